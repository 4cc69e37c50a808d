"""Metrics for TensorBoard, under the tags that torchtitan gives them."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from torch.utils.tensorboard import SummaryWriter

from twobw.training.metrics import BatchRow, ValidationRow

_GIB = 2**30


class TensorBoard:
    """Writes event files into a folder. Steps count from 1: step n is after n batches.

    Args:
        folder: for the files.
        num_ranks: of the run; ``throughput(tps)``, ``tflops`` and ``mfu(%)`` are of one rank.
        sequence_length: tokens of a sample.
    """

    def __init__(self, folder: Path, num_ranks: int, sequence_length: int) -> None:
        self._folder = folder
        self._writer = SummaryWriter(str(folder))
        self._num_ranks = num_ranks
        self._sequence_length = sequence_length

    def go_on_from(self, num_batches: int) -> None:
        """Have TensorBoard forget what comes after so many batches, since it is trained again."""
        self._writer.close()
        self._writer = SummaryWriter(str(self._folder), purge_step=num_batches + 1)

    def write_batch(self, row: BatchRow) -> None:
        """Write one batch's figures; those that are not known are left out."""
        scalars = {
            "loss_metrics/global_avg_loss": row.loss,
            "grad_norm": row.grad_norm,
            "lr": row.lr,
            "n_tokens_seen": row.samples * self._sequence_length,
            "throughput(tps)": row.tokens_per_second / self._num_ranks,
            "tflops": row.tflops,
            "mfu(%)": None if row.mfu is None else 100 * row.mfu,
            "memory/max_active(GiB)": row.peak_bytes / _GIB,
        }
        for stage, bubble in enumerate(row.bubbles):
            scalars[f"bubble(%)/stage{stage}"] = 100 * bubble
        self._write(scalars, row.batch + 1)

    def write_validation(self, row: ValidationRow) -> None:
        """Write one evaluation's figures."""
        scalars: dict[str, float | None] = {
            "validation_metrics/loss": row.validation_loss,
            "validation_metrics/perplexity": row.validation_perplexity,
            "validation_metrics/accuracy": row.validation_accuracy,
        }
        self._write(scalars, row.num_batches)

    def _write(self, scalars: dict[str, float | None], step: int) -> None:
        for tag, value in scalars.items():
            if value is not None:
                self._writer.add_scalar(tag, value, step)

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._writer.close()
