"""`Reduction`: what stands between an update's last backward and the update.

Gradients are summed over replicas and over copies of tied weights, overflow is looked for, and the
global norm is taken and clipped. Where any of this needs other ranks it runs on one background
thread a rank, in batch order and on groups of its own, behind the next batch's compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn

from twobw.runtime.collectives import Collective

Result = TypeVar("Result")
Gradients = list[Tensor | None]

_ABSENT, _SPARSE, _DENSE = range(3)  # where replicas differ, the last of these counts for all

BUCKET_BYTES = 25 * 2**20
"""Size of the flat buckets that gradients are summed in, as DistributedDataParallel's."""


@dataclass(frozen=True, slots=True)
class Tie:
    """A parameter of this stage that other stages have a copy of.

    Attributes:
        index: place of the parameter among this stage's.
        group: the stages that have it.
        is_owner: whether this stage's copy counts in the norm.
    """

    index: int
    group: Collective
    is_owner: bool


@dataclass(frozen=True, slots=True)
class Reduced:
    """What came of a reduction.

    Attributes:
        gradients: ready for the optimizer.
        norm: the global norm before clipping, where it was asked for.
        has_overflowed: some gradient of some rank is not finite: the update is to be skipped.
    """

    gradients: Gradients
    norm: float | None = None
    has_overflowed: bool = False


@dataclass(slots=True)
class Reduction:
    """What one rank's gradients go through.

    Attributes:
        replicas: the ranks of this stage.
        stages: the ranks of this pipeline.
        parameters: of this stage; their gradients have the same shapes and dtypes.
        device: where they are.
        ties: this stage's tied parameters, in an order that all stages share.
        max_grad_norm: clip the global norm to this; ``None``: neither taken nor clipped.
        looks_for_overflow: whether gradients that are not finite skip the update, on all ranks.
    """

    replicas: Collective
    stages: Collective
    parameters: Sequence[Tensor]
    device: torch.device
    ties: Sequence[Tie] = ()
    max_grad_norm: float | None = None
    looks_for_overflow: bool = False
    _thread: ThreadPoolExecutor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        # also where reading a number off a device would otherwise stall the host
        if self.needs_other_ranks or self.device.type == "cuda":
            name = f"reduction-{self.stages.index}-{self.replicas.index}"
            self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    @property
    def needs_other_ranks(self) -> bool:
        """Whether there is something to wait for."""
        takes_norm = self.max_grad_norm is not None or self.looks_for_overflow
        return self.replicas.size > 1 or bool(self.ties) or (takes_norm and self.stages.size > 1)

    def submit(self, function: Callable[[], Result]) -> Future[Result]:
        """Call ``function`` after those submitted before; here and now, if nothing needs another
        rank."""
        if self._thread is not None:
            return self._thread.submit(function)
        done: Future[Result] = Future()
        done.set_result(function())
        return done

    def divisor(self, num_samples: int) -> float:
        """What the gradient of a mean over ``num_samples`` is divided by, so that the sum over
        replicas is the mean over all their samples."""
        total = torch.tensor([float(num_samples)])
        self.replicas.all_reduce(total)
        return float(total.item()) / num_samples

    def reduce(self, gradients: Gradients, divisor: float) -> Reduced:
        """Take a rank's own gradients to what its update uses; changes them in place.

        Args:
            gradients: one a parameter, fp32; ``None`` where there is none.
            divisor: what they are divided by first.

        Raises:
            ValueError: one is sparse, and something is to be done with it that only dense ones
                allow.
        """
        with torch.no_grad():
            self._check_sparse(gradients)
            if divisor != 1.0:
                for gradient in present(gradients):
                    gradient.div_(divisor)
            if self.replicas.size > 1:
                gradients = self._sum_over_replicas(gradients)
            for tie in self.ties:
                index = tie.index
                gradients[index] = self._sum_over_copies(tie, gradients[index])
            if self.looks_for_overflow and self._has_overflowed(gradients):
                return Reduced(gradients, has_overflowed=True)
            norm = None if self.max_grad_norm is None else self._clip(gradients, self.max_grad_norm)
        return Reduced(gradients, norm)

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)

    def _sum_over_replicas(self, gradients: Gradients) -> Gradients:
        """Sum in flat buckets. A parameter that no replica has a gradient of stays without."""
        kinds = torch.tensor([float(_kind_of(gradient)) for gradient in gradients])
        self.replicas.all_reduce(kinds, "max")
        places: dict[int, list[int]] = {kind: [] for kind in (_ABSENT, _DENSE, _SPARSE)}
        for i, kind in enumerate(kinds.tolist()):
            places[int(kind)].append(i)
        summed: Gradients = [None] * len(gradients)
        for i in places[_SPARSE]:
            summed[i] = self._sum_sparse(i, gradients[i])
        for bucket in buckets(places[_DENSE], self.parameters):
            pieces = [
                self._zeros(i).flatten() if (g := gradients[i]) is None else _dense(g).flatten()
                for i in bucket
            ]
            flat = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
            for i in bucket:
                gradients[i] = None  # the bucket has it now
            self.replicas.all_reduce(flat)
            sizes = [piece.numel() for piece in pieces]
            for i, piece in zip(bucket, flat.split(sizes), strict=True):
                summed[i] = piece.view(self.parameters[i].shape)
        return summed

    def _sum_sparse(self, index: int, gradient: Tensor | None) -> Tensor:
        """The sum of gradients that have values for some rows only, as an embedding's may."""
        parameter = self.parameters[index]
        rows = torch.zeros((1, 0), dtype=torch.int64, device=self.device)
        values = parameter.new_zeros((0, *parameter.shape[1:]))
        if gradient is not None:
            gradient = gradient.coalesce()
            rows, values = gradient.indices(), gradient.values()
        counts = [int(n) for n in self.replicas.all_gather(torch.tensor([len(values)]))]
        missing = max(counts) - len(values)
        rows = torch.cat([rows, rows.new_zeros((1, missing))], dim=1)
        values = torch.cat([values, values.new_zeros((missing, *parameter.shape[1:]))])
        every_row = [r[:, :n] for r, n in zip(self.replicas.all_gather(rows), counts, strict=True)]
        every_value = [v[:n] for v, n in zip(self.replicas.all_gather(values), counts, strict=True)]
        return torch.sparse_coo_tensor(
            torch.cat(every_row, dim=1),
            torch.cat(every_value),
            parameter.shape,
            check_invariants=False,
        ).coalesce()

    def _sum_over_copies(self, tie: Tie, gradient: Tensor | None) -> Tensor | None:
        """A tied parameter's gradient, summed over the stages that have it; ``None`` if none
        has."""
        has_one = torch.tensor([float(gradient is not None)])
        tie.group.all_reduce(has_one, "max")
        if not has_one.item():
            return None
        total = self._zeros(tie.index) if gradient is None else gradient.contiguous()
        tie.group.all_reduce(total)
        return total

    def _check_sparse(self, gradients: Gradients) -> None:
        needs_dense = {
            "a tied weight": bool(self.ties),
            "max_grad_norm": self.max_grad_norm is not None,
            "precision = 'fp16' or skip_non_finite": self.looks_for_overflow,
        }
        for what, is_used in needs_dense.items():
            if is_used and any(gradient.is_sparse for gradient in present(gradients)):
                raise ValueError(
                    f"a gradient is sparse, which does not go with {what}; build the embedding "
                    "with sparse=False, and use an optimizer for dense gradients"
                )

    def _zeros(self, index: int) -> Tensor:
        parameter = self.parameters[index]
        return torch.zeros(parameter.shape, dtype=parameter.dtype, device=self.device)

    def _has_overflowed(self, gradients: Gradients) -> bool:
        finite = all(bool(g.isfinite().all()) for g in present(gradients))
        flag = torch.tensor([0.0 if finite else 1.0])
        self.stages.all_reduce(flag, "max")
        return bool(flag.item())

    def _clip(self, gradients: Gradients, max_norm: float) -> float:
        """Clip to the global norm as ``torch.nn.utils.clip_grad_norm_`` does on the whole model,
        to the bit: it is the norm of the parameters' norms, in model order."""
        copies = {tie.index for tie in self.ties if not tie.is_owner}
        norms = [
            torch.linalg.vector_norm(gradient)
            for index, gradient in enumerate(gradients)
            if gradient is not None and index not in copies
        ]
        total = torch.linalg.vector_norm(self._gather_norms(norms))
        coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for gradient in present(gradients):
            gradient.mul_(coefficient.to(gradient.device))
        return float(total.item())

    def _gather_norms(self, norms: list[Tensor]) -> Tensor:
        """Those of all stages, in order; in double precision if any is."""
        is_double = any(norm.dtype == torch.float64 for norm in norms)
        counts = [
            row.tolist() for row in self.stages.all_gather(torch.tensor([len(norms), is_double]))
        ]
        own = torch.stack([norm.double() for norm in norms]) if norms else torch.zeros(0).double()
        padded = nn.functional.pad(own, (0, max(n for n, _ in counts) - len(norms)))
        gathered = self.stages.all_gather(padded)
        every = torch.cat([row[:n] for row, (n, _) in zip(gathered, counts, strict=True)])
        return every if any(is_double for _, is_double in counts) else every.float()


def buckets(indices: Sequence[int], parameters: Sequence[Tensor]) -> Iterator[list[int]]:
    """``indices`` in runs of one dtype and of at most `BUCKET_BYTES`, or of one."""
    bucket: list[int] = []
    size = 0
    for index in indices:
        num_bytes = parameters[index].nbytes
        is_other = bucket and parameters[index].dtype != parameters[bucket[-1]].dtype
        if bucket and (is_other or size + num_bytes > BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(index)
        size += num_bytes
    if bucket:
        yield bucket


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def _kind_of(gradient: Tensor | None) -> int:
    return _ABSENT if gradient is None else _SPARSE if gradient.is_sparse else _DENSE


def present(gradients: Gradients) -> Iterator[Tensor]:
    """Those that are there."""
    return (gradient for gradient in gradients if gradient is not None)
