"""What to do about a loss that is no longer finite, and about updates that are all skipped."""

from __future__ import annotations

import math

from twobw.config import Config
from twobw.runtime.finiteness import NonFinite

# Each overflow halves fp16's loss scale, so by then it is not the scale that makes gradients
# overflow; nor is it a bad batch, in other precisions.
_MOST_SKIPPED = 50


class Divergence:
    """Watches a run's batches, and says why there is no use in going on.

    Attributes:
        failure: that, and what to try; ``None`` as long as all is well.

    Args:
        config: of the run; its ``training.on_divergence`` says what to do.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._wish = config.training.on_divergence
        self._num_skipped = 0
        self._what: str | None = None
        self._remedy = ""
        self._non_finite: NonFinite | None = None

    @property
    def failure(self) -> str | None:
        """See the class."""
        if self._what is None:
            return None
        where = f" ({self._where(self._non_finite)})" if self._non_finite else ""
        return f"{self._what}{where}; try {self._remedy}{self._remedies()}"

    def add(self, batch: int, loss: float, is_skipped: bool) -> str | None:
        """Take in a batch's training loss, and whether its update was skipped, since fp16
        overflowed or its gradient was not finite: then the weights have come to no harm, whatever
        the loss.

        Returns:
            What the user should know, where the run goes on all the same.
        """
        self._num_skipped = self._num_skipped + 1 if is_skipped else 0
        if self._what is not None:
            return None
        if self._num_skipped == _MOST_SKIPPED:
            self._give_up_skipping(batch)
        elif math.isfinite(loss):
            return None
        elif is_skipped:
            return f"the loss is {loss} at step {batch + 1}; its update is left out"
        elif self._wish == "stop":
            self._what = f"the loss is {loss} at step {batch + 1}"
        else:
            return f"the loss is {loss} at step {batch + 1}; training goes on"
        return None

    def end(
        self,
        num_batches: int,
        validation_loss: float,
        has_finite_weights: bool,
        non_finite: NonFinite | None = None,
    ) -> None:
        """Take in what the run leaves: the last update may have been the one too many; and where
        values that are not finite first appeared."""
        self._non_finite = non_finite
        if self._what is None and not (has_finite_weights and math.isfinite(validation_loss)):
            what = "validation loss is" if has_finite_weights else "weights are"
            self._what = f"the {what} not finite after step {num_batches}"

    def _give_up_skipping(self, batch: int) -> None:
        last = f"the last {_MOST_SKIPPED} updates, up to step {batch + 1}"
        if self._config.training.precision == "fp16":
            self._what = f"fp16 has skipped {last}, since gradients overflow at any loss scale"
            self._remedy = 'training.precision = "bf16", '
        else:
            self._what = f"{last}, were left out, since their gradients are not finite"

    def _where(self, non_finite: NonFinite) -> str:
        """Where it began, in the run's terms."""
        last = self._config.model.size().list_length - 1
        names = {0: "the embedding", last: "the head", last + 1: "the loss"}
        name = names.get(non_finite.layer, f"block {non_finite.layer - 1}")
        return (
            f"first in step {non_finite.batch + 1}, batch {non_finite.batch}: {name} (layer "
            f"{non_finite.layer}) on stage {non_finite.stage} gave values that are not finite, in "
            f"microbatch {non_finite.microbatch}, on weight version {non_finite.version}"
        )

    def _remedies(self) -> str:
        """What often helps, with the values now."""
        optimizer, max_grad_norm = self._config.optimizer, self._config.training.max_grad_norm
        matrix = f" and optimizer.matrix_lr (now {optimizer.matrix_lr})"
        norm = "training.max_grad_norm = 1.0 (now 0, no clipping)"
        if max_grad_norm:
            norm = f"a lower training.max_grad_norm (now {max_grad_norm})"
        return (
            f"a lower optimizer.lr (now {optimizer.lr})"
            f"{matrix if optimizer.name == 'muon' else ''}, more optimizer.warmup_batches (now "
            f"{optimizer.warmup_batches}), or {norm}"
        )
