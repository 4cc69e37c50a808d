"""What passes between stages: a tensor or a tuple of tensors (``None`` allowed), and its layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

Value: TypeAlias = Tensor | tuple[Tensor | None, ...]
"""What a layer takes and gives."""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Shape, dtype and whether a gradient is wanted back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a whole message; `encode` and `decode` are its form on the wire."""

    is_tuple: bool
    tensors: tuple[TensorLayout | None, ...]

    def encode(self) -> list[int]:
        """As integers: ``is_tuple``, count, then dtype, requires_grad, rank, sizes of each."""
        numbers = [int(self.is_tuple), len(self.tensors)]
        for tensor in self.tensors:
            if tensor is None:
                numbers.append(-1)
            else:
                code = _DTYPES.index(tensor.dtype)
                numbers += [code, int(tensor.requires_grad), len(tensor.shape), *tensor.shape]
        return numbers

    @staticmethod
    def decode(numbers: Sequence[int]) -> Layout:
        """The inverse of `encode`."""
        stream = iter(numbers)
        is_tuple, count = bool(next(stream)), next(stream)
        return Layout(is_tuple, tuple(_decode_tensor(stream) for _ in range(count)))

    def __str__(self) -> str:
        """``float32[4, 8]`` or a tuple of such."""
        parts = [
            "None" if t is None else f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"
            for t in self.tensors
        ]
        return f"({', '.join(parts)})" if self.is_tuple else parts[0]


@dataclass(frozen=True, slots=True)
class Message:
    """Tensors on their way between stages, without autograd history."""

    tensors: tuple[Tensor | None, ...]
    layout: Layout

    @staticmethod
    def of(value: Value) -> Message:
        """A message that carries ``value``."""
        tensors = value if isinstance(value, tuple) else (value,)
        layout = Layout(
            isinstance(value, tuple),
            tuple(
                None if t is None else TensorLayout(tuple(t.shape), t.dtype, t.requires_grad)
                for t in tensors
            ),
        )
        return Message(tuple(None if t is None else t.detach() for t in tensors), layout)

    @property
    def wanting(self) -> list[int]:
        """Which of the tensors require a gradient."""
        layouts = enumerate(self.layout.tensors)
        return [index for index, layout in layouts if layout is not None and layout.requires_grad]


def as_value(tensors: Sequence[Tensor | None], *, is_tuple: bool) -> Value:
    """The tensors of a message in the form that a layer takes."""
    if is_tuple:
        return tuple(tensors)
    (tensor,) = tensors
    assert tensor is not None, "a single value is never None"
    return tensor


def check_value(value: object, giver: str) -> Value:
    """``value``, if a stage can send it.

    Raises:
        TypeError: it is neither a tensor nor a tuple of tensors (or ``None``).
    """
    if isinstance(value, Tensor):
        return value
    if isinstance(value, tuple) and all(t is None or isinstance(t, Tensor) for t in value):
        return value
    kind = type(value).__name__
    raise TypeError(f"{giver} gave a {kind}; a layer gives a tensor or a tuple of tensors")


def map_value(function: Callable[[Tensor], Tensor], value: Value) -> Value:
    """``function`` applied to each tensor of ``value``."""
    if isinstance(value, Tensor):
        return function(value)
    return tuple(None if tensor is None else function(tensor) for tensor in value)


def _decode_tensor(stream: Iterator[int]) -> TensorLayout | None:
    code = next(stream)
    if code < 0:
        return None
    requires_grad, rank = bool(next(stream)), next(stream)
    return TensorLayout(tuple(next(stream) for _ in range(rank)), _DTYPES[code], requires_grad)


_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
