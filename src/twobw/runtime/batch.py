"""A batch on its way through one rank: how it is cut into microbatches, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from twobw.runtime.messages import Value, map_value
from twobw.runtime.transport import Note


@dataclass(frozen=True, slots=True)
class BatchHeader:
    """What stage 0 tells the other stages of a batch before it starts.

    Attributes:
        batch: number of the batch, 0-based.
        num_samples: in this pipeline's part of the batch.
        large_key: layout key of the first ``num_samples % m`` microbatches, which have a sample
            more than the others.
        small_key: layout key of the others.
        is_last: whether training stops after this batch.
    """

    batch: int
    num_samples: int
    large_key: int
    small_key: int
    is_last: bool

    def numbers(self) -> list[float]:
        """As numbers for a `Transport`."""
        return [self.batch, self.num_samples, self.large_key, self.small_key, self.is_last]

    @staticmethod
    def of(numbers: Sequence[float]) -> BatchHeader:
        """The inverse of `numbers`."""
        batch, num_samples, large_key, small_key = (int(number) for number in numbers[:4])
        return BatchHeader(batch, num_samples, large_key, small_key, bool(numbers[4]))


HEADER_LENGTH = 5


class Batch:
    """One batch on one rank.

    Args:
        header: what stage 0 said.
        num_microbatches: how many it is cut into.
        inputs: on the first stage, with the batch first.
        targets: likewise on the last stage.
        note: where the loss and the divisor of the gradients arrive from the last stage; on the
            last stage itself `end_forwards` makes it.
    """

    def __init__(
        self,
        header: BatchHeader,
        num_microbatches: int,
        *,
        inputs: Value | None = None,
        targets: Value | None = None,
        note: Note | None = None,
        push: Callable[[list[float]], None] | None = None,
    ) -> None:
        self.header = header
        self.sizes = split_sizes(header.num_samples, num_microbatches)
        self.inputs = None if inputs is None else split(inputs, self.sizes)
        self.targets = None if targets is None else split(targets, self.sizes)
        self._note = note
        self._push = push
        self._loss: Tensor | None = None
        self._weight: float | None = None
        self._numbers: list[float] | None = None

    def key(self, place: int) -> int:
        """The layout key of the microbatch at ``place``."""
        large = self.header.num_samples % len(self.sizes)
        return self.header.large_key if place < large else self.header.small_key

    def share(self, place: int) -> float:
        """The share of a microbatch in the batch's samples."""
        return self.sizes[place] / self.header.num_samples

    def add_mean(self, loss: Tensor, place: int) -> None:
        """Take in a microbatch's mean loss."""
        self._add(loss.double() * self.share(place))

    def add_sum(self, loss: Tensor, weight: float) -> None:
        """Take in a microbatch's summed loss and its weight."""
        self._weight = (self._weight or 0.0) + weight
        self._add(loss.double())

    def end_forwards(self) -> None:
        """All losses are in: make them known."""
        assert self._loss is not None
        total, divisor = self._loss.item(), 1.0 if self._weight is None else self._weight
        self._numbers = [total / divisor if divisor else float("nan"), divisor]
        if self._push is not None:
            self._push(self._numbers)

    def loss(self) -> float:
        """The mean over the batch, when it has arrived."""
        return self._arrived()[0]

    def divisor(self) -> float:
        """What the batch's gradients must be divided by: the sum of the microbatches' weights, or
        1 where each was scaled by its share."""
        return self._arrived()[1]

    def _add(self, loss: Tensor) -> None:
        self._loss = loss if self._loss is None else self._loss + loss

    def _arrived(self) -> list[float]:
        if self._numbers is None:
            assert self._note is not None, "only the last stage has none"
            self._numbers = self._note.wait()
        return self._numbers


def split_sizes(num_samples: int, num_microbatches: int) -> list[int]:
    """Sizes of microbatches, as even as can be, as ``torch.tensor_split`` cuts."""
    size, large = divmod(num_samples, num_microbatches)
    return [size + (place < large) for place in range(num_microbatches)]


def count_samples(value: Value, what: str, num_microbatches: int) -> int:
    """The size of the leading dimension, which all tensors of ``value`` share.

    Raises:
        ValueError: they do not, or there are fewer samples than microbatches.
    """
    tensors = value if isinstance(value, tuple) else (value,)
    sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors if tensor is not None}
    if len(sizes) != 1:
        raise ValueError(f"{what} have leading dimensions {sorted(sizes)}; they must have the same")
    (size,) = sizes
    if size < num_microbatches:
        raise ValueError(
            f"{what} have {size} samples, fewer than num_microbatches = {num_microbatches}; "
            "give a larger batch or fewer microbatches"
        )
    return size


def split(value: Value, sizes: list[int]) -> list[Value]:
    """``value`` cut along the leading dimension."""
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    return [
        map_value(lambda t, a=start, n=size: t.detach()[a : a + n], value)  # type: ignore[misc]
        for start, size in zip(starts, sizes, strict=True)
    ]
