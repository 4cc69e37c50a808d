"""What passes between stages: a tensor or a tuple of tensors (``None`` allowed), and its layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeGuard

import torch
from torch import Tensor

Value: TypeAlias = Tensor | tuple[Tensor | None, ...]
"""What a layer takes and gives."""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """A tensor without its numbers.

    Attributes:
        shape: of it.
        dtype: likewise.
        requires_grad: whether a gradient is wanted back.
        order: of the dimensions in memory from the outermost to the innermost (channels last, say).
        shares_memory: whether another tensor of the message has the same storage.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    order: tuple[int, ...]
    shares_memory: bool = False

    @staticmethod
    def of(tensor: Tensor, *, shares_memory: bool = False) -> TensorLayout:
        """That of ``tensor``, in memory as ``tensor.clone()`` is."""
        order = tuple(range(tensor.dim()))
        if not tensor.is_contiguous():
            strides = torch.empty_like(tensor, device="meta").stride()
            order = tuple(sorted(order, key=lambda dimension: -strides[dimension]))
        return TensorLayout(
            tuple(tensor.shape), tensor.dtype, tensor.requires_grad, order, shares_memory
        )

    def fits(self, other: TensorLayout) -> bool:
        """Whether they differ in no more than how they lie in memory."""
        return replace(self, order=other.order, shares_memory=other.shares_memory) == other

    def empty(self, device: torch.device) -> Tensor:
        """A tensor of this layout; permuted by `order` it is contiguous."""
        outer = [self.shape[dimension] for dimension in self.order]
        inverse = sorted(range(len(outer)), key=lambda place: self.order[place])
        return torch.empty(outer, dtype=self.dtype, device=device).permute(inverse)


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a whole message; `encode` and `decode` are its form on the wire."""

    is_tuple: bool
    tensors: tuple[TensorLayout | None, ...]

    def encode(self) -> list[int]:
        """``is_tuple``, count, then of each tensor dtype, requires_grad, shares_memory, rank, sizes
        and order."""
        numbers = [int(self.is_tuple), len(self.tensors)]
        for tensor in self.tensors:
            if tensor is None:
                numbers.append(-1)
            else:
                code = _DTYPES.index(tensor.dtype)
                flags = int(tensor.requires_grad), int(tensor.shares_memory)
                numbers += [code, *flags, len(tensor.shape), *tensor.shape, *tensor.order]
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
        memory = Counter(t.untyped_storage()._cdata for t in tensors if t is not None)
        layouts = (
            None
            if t is None
            else TensorLayout.of(t, shares_memory=memory[t.untyped_storage()._cdata] > 1)
            for t in tensors
        )
        layout = Layout(isinstance(value, tuple), tuple(layouts))
        return Message(tuple(None if t is None else t.detach() for t in tensors), layout)

    def copy(self) -> Message:
        """The same in memory of its own."""
        copies = iter(copies_of([tensor for tensor in self.tensors if tensor is not None]))
        return replace(
            self, tensors=tuple(None if t is None else next(copies) for t in self.tensors)
        )

    @property
    def wanting(self) -> list[int]:
        """Which of the tensors require a gradient."""
        layouts = enumerate(self.layout.tensors)
        return [index for index, layout in layouts if layout is not None and layout.requires_grad]


def copies_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies that lie in memory as the originals: with their strides, sharing it among each other
    where they do, and as far from a 64-byte boundary. By the last, too, kernels of matrices on a
    CPU choose the order of their sums, and so the last bit."""
    groups: dict[tuple[object, ...], list[Tensor]] = {}
    for tensor in tensors:
        key = tensor.untyped_storage()._cdata, tensor.dtype, tensor.requires_grad
        groups.setdefault(key, []).append(tensor)
    copies: dict[Tensor, Tensor] = {}
    for group in groups.values():
        first = min(tensor.storage_offset() for tensor in group)
        size = max(tensor.storage_offset() + _extent(tensor) for tensor in group) - first
        whole = group[0].as_strided((size,), (1,), first)
        shift = 0
        if whole.device.type == "cpu":
            shift = whole.data_ptr() % 64 // whole.element_size()
        storage = whole.new_empty(shift + size)
        storage[shift:].copy_(whole)
        for tensor in group:
            place = shift + tensor.storage_offset() - first
            copies[tensor] = storage.as_strided(tensor.shape, tensor.stride(), place)
    return [copies[tensor] for tensor in tensors]


def _extent(tensor: Tensor) -> int:
    """Numbers from a tensor's first in memory to its last."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps)


def as_value(tensors: Sequence[Tensor | None], *, is_tuple: bool) -> Value:
    """The tensors of a message in the form that a layer takes."""
    if is_tuple:
        return tuple(tensors)
    (tensor,) = tensors
    assert tensor is not None, "a single value is never None"
    return tensor


def is_value(value: object) -> TypeGuard[Value]:
    """Whether a layer may take and give it."""
    parts = value if isinstance(value, tuple) else (value,)
    return all(isinstance(t, Tensor) or (t is None and parts is value) for t in parts)


def check_value(value: object, giver: str) -> Value:
    """``value``, if a stage can send it.

    Raises:
        TypeError: it is neither a tensor nor a tuple of tensors (or ``None``).
    """
    if is_value(value):
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
    requires_grad, shares_memory, rank = bool(next(stream)), bool(next(stream)), next(stream)
    shape, order = (tuple(next(stream) for _ in range(rank)) for _ in range(2))
    return TensorLayout(shape, _DTYPES[code], requires_grad, order, shares_memory)


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
