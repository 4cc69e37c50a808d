"""A batch on its way through one rank: how it is cut into microbatches, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor

from twobw.runtime.collectives import Collective
from twobw.runtime.messages import Value, is_value, map_value
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
        has_loss: whether this rank computes the loss.
        note: where what `sum_up` gives on the last stage arrives; the last stage sets it when
            its last forward is over.
    """

    def __init__(
        self,
        header: BatchHeader,
        num_microbatches: int,
        *,
        inputs: Value | None = None,
        targets: Value | None = None,
        has_loss: bool = True,
        note: Note | None = None,
    ) -> None:
        self.header = header
        self.sizes = split_sizes(header.num_samples, num_microbatches)
        self.inputs = None if inputs is None else split(inputs, self.sizes)
        self.targets = None if targets is None else split(targets, self.sizes)
        self.has_loss = has_loss
        self.outputs: list[Value] = []
        self.note = note
        self.grad_norm: float | None = None
        self.is_skipped: bool | None = None
        self._lock = Lock()
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

    def sum_up(self, replicas: Collective) -> list[float]:
        """When all losses are in: the mean loss over all replicas' samples (or weights), and
        what this replica's gradients must be divided by before they are summed. Where nothing
        counts (all targets ignored) the mean is NaN, and the gradients are the zeros they are."""
        assert self._loss is not None
        loss, weight = self._loss, self._weight
        if replicas.size == 1:
            if weight is None:
                return [loss.item(), 1.0]
            return [loss.item() / weight if weight else float("nan"), weight or 1.0]
        samples = self.header.num_samples
        own = [loss.item() * samples, samples] if weight is None else [loss.item(), weight]
        totals = torch.tensor(own, dtype=torch.float64, device=loss.device)
        replicas.all_reduce(totals)
        total, total_weight = totals.tolist()
        divisor = total_weight / samples if weight is None else total_weight or 1.0
        return [total / total_weight if total_weight else float("nan"), divisor]

    def loss(self) -> float:
        """The mean over the global batch, when it has arrived."""
        return self._arrived()[0]

    def divisor(self) -> float:
        """What the batch's gradients must be divided by, when it has arrived."""
        return self._arrived()[1]

    def _add(self, loss: Tensor) -> None:
        self._loss = loss if self._loss is None else self._loss + loss

    def _arrived(self) -> list[float]:
        with self._lock:  # the reduction's thread asks, too
            if self._numbers is None:
                assert self.note is not None, "set before the last forward ends"
                self._numbers = self.note.wait()
            return self._numbers


def split_sizes(num_samples: int, num_microbatches: int) -> list[int]:
    """Sizes of microbatches, as even as can be, as ``torch.tensor_split`` cuts."""
    size, large = divmod(num_samples, num_microbatches)
    return [size + (place < large) for place in range(num_microbatches)]


def count_samples(value: Value, what: str, num_microbatches: int) -> int:
    """The size of the leading dimension, which all tensors of ``value`` share.

    Raises:
        TypeError: it is no tensor or tuple of tensors.
        ValueError: they do not, or there are fewer samples than microbatches.
    """
    if not is_value(value):
        raise TypeError(
            f"{what} are a {type(value).__name__}; they must be a tensor or a tuple of tensors"
        )
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
    """``value`` cut along the leading dimension. Each piece has a version counter of its own
    (``.data``), so that a first layer may work in place on one while another is in flight."""
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    return [
        map_value(lambda t, a=start, n=size: t[a : a + n].data, value)  # type: ignore[misc]
        for start, size in zip(starts, sizes, strict=True)
    ]


def join(values: Sequence[Value]) -> Value:
    """Microbatches' outputs as one batch.

    Raises:
        ValueError: they are not by sample.
    """
    if isinstance(values[0], Tensor):
        return _concatenated([value for value in values if isinstance(value, Tensor)])
    columns = zip(*(value for value in values if isinstance(value, tuple)), strict=True)
    return tuple(
        None if column[0] is None else _concatenated([t for t in column if t is not None])
        for column in columns
    )


def _concatenated(outputs: Sequence[Tensor]) -> Tensor:
    if outputs[0].dim() == 0:
        raise ValueError(
            "the last layer gives a tensor without dimensions for a microbatch; forward puts "
            "outputs together along the first dimension, by sample. For a loss, use evaluate"
        )
    return torch.cat(list(outputs))
