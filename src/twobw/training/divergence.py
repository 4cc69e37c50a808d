"""When to give a run up: its loss is no longer finite, or fp16 skips every update."""

from __future__ import annotations

import math

from twobw.config import Config

# Each overflow halves the loss scale, so by then it is not the scale that makes gradients overflow.
_MOST_SKIPPED = 50


class Divergence:
    """Watches a run's batches, and says why there is no use in going on.

    Attributes:
        failure: that, and what to try; ``None`` as long as all is well.

    Args:
        config: of the run.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._num_skipped = 0
        self.failure: str | None = None

    def add(self, batch: int, loss: float, is_skipped: bool) -> None:
        """Take in a batch's training loss, and whether fp16 overflowed so that its update was
        skipped: then the weights have come to no harm, whatever the loss."""
        self._num_skipped = self._num_skipped + 1 if is_skipped else 0
        if self.failure is not None:
            return
        if self._num_skipped == _MOST_SKIPPED:
            self.failure = (
                f"fp16 has skipped the last {_MOST_SKIPPED} updates, up to step {batch + 1}, since "
                f'gradients overflow at any loss scale; try training.precision = "bf16", '
                f"{self._remedies()}"
            )
        elif not (is_skipped or math.isfinite(loss)):
            self.failure = f"the loss is {loss} at step {batch + 1}; try {self._remedies()}"

    def end(self, num_batches: int, validation_loss: float, has_finite_weights: bool) -> None:
        """Take in what the run leaves: the last update may have been the one too many."""
        if self.failure is None and not (has_finite_weights and math.isfinite(validation_loss)):
            what = "validation loss is" if has_finite_weights else "weights are"
            self.failure = f"the {what} not finite after step {num_batches}; try {self._remedies()}"

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
