"""`Optimization`: a rank's optimizers and their schedulers, stepped together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from twobw.runtime.collectives import Collective
from twobw.runtime.reduction import buckets

NamedParameters: TypeAlias = list[tuple[str, nn.Parameter]]
OptimizerFactory: TypeAlias = Callable[[NamedParameters], Optimizer | Sequence[Optimizer]]
SchedulerFactory: TypeAlias = Callable[[Optimizer], LRScheduler]


class Optimization:
    """The optimizers of one rank; none where nothing trains.

    Args:
        parameters: named, as the optimizers are to see them.
        make_optimizer: from the parameters to one optimizer or several.
        make_scheduler: from an optimizer to its learning-rate scheduler.
        shards: the replicas over which optimizer state is spread (ZeRO stage 1, Rajbhandari et
            al., 2020): each has the optimizers of its share of the parameters, and after a step
            sends what has changed to the others. ``None``: each has all.

    Raises:
        ValueError: an optimizer needs a closure, or is over other parameters than those given; a
            scheduler needs a metric.
    """

    def __init__(
        self,
        parameters: NamedParameters,
        make_optimizer: OptimizerFactory,
        make_scheduler: SchedulerFactory | None,
        shards: Collective | None = None,
    ) -> None:
        self._shards = shards
        self._parameters = parameters
        self._shares = [parameters]
        if shards is not None:
            self._shares = share_out(parameters, shards.size)
            parameters = self._shares[shards.index]
        made = make_optimizer(parameters) if parameters else []
        self.optimizers = [made] if isinstance(made, Optimizer) else list(made)
        given = {parameter for _, parameter in parameters}
        for optimizer in self.optimizers:
            if isinstance(optimizer, LBFGS):
                raise ValueError(
                    "LBFGS evaluates the loss itself; use an optimizer without closure"
                )
            held = (p for group in optimizer.param_groups for p in group["params"])
            if not given.issuperset(held):
                raise ValueError(
                    f"{type(optimizer).__name__} holds parameters that are not among those given; "
                    "make it over the (name, parameter) pairs that optimizer is called with, "
                    "since those are where the newest weights are"
                )
        self.schedulers = [make_scheduler(o) for o in self.optimizers] if make_scheduler else []
        if any(isinstance(scheduler, ReduceLROnPlateau) for scheduler in self.schedulers):
            raise ValueError(
                "lr_scheduler gave a ReduceLROnPlateau, which needs a metric at each step; use a "
                "scheduler whose rate depends on the batch alone, since stages update at different "
                "times"
            )

    def step(self, places: Sequence[int]) -> None:
        """Make the optimizers change in place the parameters of these places, which are those
        that have a gradient now."""
        for optimizer in self.optimizers:
            optimizer.step()
        if self._shards is not None and self._shards.size > 1:
            changed = {self._parameters[place][1] for place in places}
            for owner, share in enumerate(self._shares):
                self._send_share(owner, [p.data for _, p in share if p in changed])

    @property
    def is_sharded(self) -> bool:
        """Whether the optimizers are those of this replica's share only."""
        return self._shards is not None

    def pairs(self) -> list[tuple[Optimizer, LRScheduler | None]]:
        """Each optimizer and its scheduler."""
        schedulers: Sequence[LRScheduler | None] = self.schedulers or [None] * len(self.optimizers)
        return list(zip(self.optimizers, schedulers, strict=True))

    def end_batch(self) -> None:
        """Move on to the next batch's learning rate. Each rank does so after its own update of a
        batch, so that batch ``k`` has rate ``k`` everywhere."""
        for scheduler in self.schedulers:
            scheduler.step()

    def _send_share(self, owner: int, weights: list[Tensor]) -> None:
        """From the replica that has changed them to the others, in flat buckets."""
        assert self._shards is not None
        for bucket in buckets(range(len(weights)), weights):
            own = [weights[index].flatten() for index in bucket]
            flat = own[0] if len(own) == 1 else torch.cat(own)
            self._shards.broadcast(flat, owner)
            if owner != self._shards.index:
                pieces = flat.split([piece.numel() for piece in own])
                for index, piece in zip(bucket, pieces, strict=True):
                    weights[index].copy_(piece.view_as(weights[index]))


def share_out(parameters: NamedParameters, num_shares: int) -> list[NamedParameters]:
    """Parameters spread so that the shares are about equally large: each, the largest first, goes
    to the smallest share so far. The order within a share is that of the parameters."""
    sizes = [0] * num_shares
    share_of: dict[str, int] = {}
    for name, parameter in sorted(parameters, key=lambda pair: -pair[1].numel()):
        smallest = sizes.index(min(sizes))
        share_of[name] = smallest
        sizes[smallest] += parameter.numel()
    return [[pair for pair in parameters if share_of[pair[0]] == s] for s in range(num_shares)]
