"""What `Pipeline.train_step` gives back."""

from __future__ import annotations

from dataclasses import dataclass

from twobw.runtime.batch import Batch
from twobw.runtime.transport import Note


@dataclass(frozen=True, slots=True)
class StageMetrics:
    """What one stage did during one `train_step`.

    Attributes:
        busy_fraction: share of the time since the previous step ended spent in forward, backward
            and update.
        num_versions: weight versions held.
        peak_bytes: the most memory in use so far: allocated on a GPU, else what its process has had
            resident beyond interpreter and libraries.
    """

    busy_fraction: float
    num_versions: int
    peak_bytes: int


class Loss:
    """A batch's loss; ``float(loss)`` waits until it has arrived."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def __float__(self) -> float:
        return self._batch.loss()

    def __repr__(self) -> str:
        return f"Loss({float(self)})"


class StepResult:
    """What `Pipeline.train_step` gives back.

    Attributes:
        batch: number of the batch, 0-based.
        loss: handle of the mean loss over the batch.
        grad_norm: the global norm of the batch's gradient before clipping, where it is clipped;
            known once the batch's update is made, ``None`` before.
        is_skipped: whether the update was left out, since fp16 overflowed or, with
            ``skip_non_finite``, the gradient is not finite; known like ``grad_norm``.
        is_last: whether a stop was requested: all ranks leave their loops after this batch.
    """

    def __init__(self, batch: Batch, metrics: list[list[float] | Note] | None) -> None:
        self.batch = batch.header.batch
        self._batch = batch
        self.loss = Loss(batch)
        self.is_last = batch.header.is_last
        self._metrics = metrics

    @property
    def grad_norm(self) -> float | None:
        """See the class."""
        return self._batch.grad_norm

    @property
    def is_skipped(self) -> bool | None:
        """See the class."""
        return self._batch.is_skipped

    def stage_metrics(self) -> list[StageMetrics] | None:
        """One a stage, on rank 0; waits until they have arrived. ``None`` elsewhere."""
        if self._metrics is None:
            return None
        numbers = [m if isinstance(m, list) else m.wait() for m in self._metrics]
        self._metrics = list(numbers)
        return [StageMetrics(busy, int(versions), int(peak)) for busy, versions, peak in numbers]

    def settle(self) -> None:
        """Wait for all that is on its way here."""
        float(self.loss)
        self.stage_metrics()
