"""`Optimization`: a rank's optimizers and their schedulers, stepped together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from torch import nn
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler

NamedParameters: TypeAlias = list[tuple[str, nn.Parameter]]
OptimizerFactory: TypeAlias = Callable[[NamedParameters], Optimizer | Sequence[Optimizer]]
SchedulerFactory: TypeAlias = Callable[[Optimizer], LRScheduler]


class Optimization:
    """The optimizers of one rank; none where nothing trains.

    Args:
        parameters: named, as the optimizers are to see them.
        make_optimizer: from the parameters to one optimizer or several.
        make_scheduler: from an optimizer to its learning-rate scheduler.

    Raises:
        ValueError: an optimizer needs a closure.
    """

    def __init__(
        self,
        parameters: NamedParameters,
        make_optimizer: OptimizerFactory,
        make_scheduler: SchedulerFactory | None,
    ) -> None:
        made = make_optimizer(parameters) if parameters else []
        self.optimizers = [made] if isinstance(made, Optimizer) else list(made)
        for optimizer in self.optimizers:
            if isinstance(optimizer, LBFGS):
                raise ValueError(
                    "LBFGS evaluates the loss itself; use an optimizer without closure"
                )
        self.schedulers = [make_scheduler(o) for o in self.optimizers] if make_scheduler else []

    def step(self) -> None:
        """Make the optimizers change the parameters in place."""
        for optimizer in self.optimizers:
            optimizer.step()

    def end_batch(self) -> None:
        """Move on to the next batch's learning rate. Each rank does so after its own update of a
        batch, so that batch ``k`` has rate ``k`` everywhere."""
        for scheduler in self.schedulers:
            scheduler.step()
