"""What rank 0 shows and writes while a run goes and when it ends."""

from __future__ import annotations

import math
import shlex
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from torch import Tensor

import twobw
from twobw.config import Config
from twobw.core.timeline import Timeline
from twobw.models.sizes import BertConfig, GPTConfig
from twobw.models.whole import flops_per_token, model_with, num_parameters
from twobw.reports.perfetto import chrome_trace
from twobw.runtime.finiteness import NonFinite
from twobw.runtime.results import StepResult
from twobw.training.data import Samples
from twobw.training.device import own_device, peak_flops
from twobw.training.divergence import Divergence
from twobw.training.metrics import (
    BatchRow,
    MetricsWriter,
    RecentBatches,
    StageAverages,
    StageRow,
    Summary,
    ValidationRow,
    finite,
    perplexity,
)
from twobw.training.optimizer import lr_at
from twobw.training.progress import Progress, duration, make_progress
from twobw.training.resuming import Start
from twobw.training.run_folder import (
    BEST_WEIGHTS,
    METRICS,
    SUMMARY,
    TENSORBOARD,
    TIMELINE,
    WEIGHTS,
    write_json,
)
from twobw.training.sampling import generate
from twobw.training.weights import save_weights

if TYPE_CHECKING:
    from twobw.training.tensorboard import TensorBoard

PROMPT = "def "
_SAMPLE_TOKENS = 200
_PACKAGE = str(Path(twobw.__file__).parent)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run has come to, on rank 0.

    Attributes:
        seconds: of training, from the first batch's start to the drain's end.
        weights: under the model's own names.
        timeline: of the last batches.
        non_finite: where values that are not finite first appeared in training, if they did.
    """

    seconds: float
    weights: dict[str, Tensor]
    timeline: Timeline
    non_finite: NonFinite | None


@contextmanager
def open_report(config: Config, folder: Path, command: str) -> Iterator[RunReport]:
    """Rank 0's report of a run, on standard output; warnings of this package are shown too.
    ``command`` is how the user calls this program."""
    progress = make_progress(sys.stdout, config.training.num_batches, config.num_ranks)
    with ExitStack() as stack:
        metrics = stack.enter_context(MetricsWriter(folder / METRICS))
        board = None
        if config.run.tensorboard:
            from twobw.training.tensorboard import TensorBoard

            length = config.model.sequence_length
            board = stack.enter_context(TensorBoard(folder / TENSORBOARD, config.num_ranks, length))
        stack.enter_context(closing(progress))
        stack.enter_context(_warnings_noted(progress))
        yield RunReport(config, folder, command, metrics, progress, board)


class RunReport:
    """Takes in a run's figures, shows them, and writes the files of the run's folder."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        command: str,
        metrics: MetricsWriter,
        progress: Progress,
        board: TensorBoard | None = None,
    ) -> None:
        self._config = config
        self._folder = folder
        self._command = command
        self._averages = StageAverages()
        self._recent = RecentBatches()
        self._split: list[int] = []
        self._metrics = metrics
        self._progress = progress
        self._board = board
        self._flops_per_token = flops_per_token(config.model.size())
        is_16_bit = config.training.precision != "fp32"
        self._peak_flops = peak_flops(own_device(config.training.device)) if is_16_bit else None
        self._num_batches = 0
        self._num_skipped = 0
        self._start = Start()
        self._samples = 0
        self._seconds = 0.0  # of training, before the start
        self._length = config.model.sequence_length
        self._divergence = Divergence(config)
        self._loss = math.nan
        self._validations: list[ValidationRow] = []

    @property
    def failure(self) -> str | None:
        """Why there is no use in going on; ``None`` as long as all is well."""
        return self._divergence.failure

    def switched(self, num_batches: int, update_lag: int) -> None:
        """Say that the schedule has begun with a measured update lag, after so many batches."""
        what = "microbatch" if update_lag == 1 else "microbatches"
        self._progress.note(
            f"{self._config.parallel.schedule} from step {num_batches + 1}: update_lag is "
            f"{update_lag} {what}, as measured"
        )

    def begin(self, data: Samples, split: list[int], start: Start) -> None:
        """Say what will be trained on what, and take up what was reported before ``start``."""
        config, parallel = self._config, self._config.parallel
        self._split = split
        self._start = start
        for row in self._metrics.go_on_from(start.batch):
            self._take_up(row)
        replicas = f" x {parallel.dp} replicas" if parallel.dp > 1 else ""
        self._progress.note(
            f"{config.model.name}: {num_parameters(config.model.size()):,} parameters in "
            f"{parallel.pp} stages of {split} layers{replicas}; {parallel.schedule}, "
            f"{parallel.num_microbatches} microbatches, {config.training.precision}"
        )
        self._progress.note(data.description)
        if start.batch:
            if self._board:
                self._board.go_on_from(start.batch)
            self._progress.note(f"goes on after step {start.batch} ({start.samples:,} samples)")
        self._progress.note(
            f"tps, tflops and mfu are of each of the {config.num_ranks} ranks; "
            f"{self._flops_per_token:,} floating-point operations a token; "
            f"loss in {loss_unit(config)}"
        )

    def _take_up(self, row: BatchRow | ValidationRow) -> None:
        """A row of before: of other stages, the figures of each are not those of now."""
        if isinstance(row, ValidationRow):
            self._validations.append(row)
            return
        is_skipped = row.num_skipped > self._num_skipped
        self._seconds += (row.samples - self._samples) * self._length / row.tokens_per_second
        self._num_batches, self._samples = row.batch + 1, row.samples
        self._num_skipped, self._loss = row.num_skipped, row.loss
        self._divergence.add(row.batch, row.loss, is_skipped)
        if len(row.stages) == self._config.parallel.pp:
            self._averages.add(row.stages)

    def add(self, result: StepResult, seconds: float) -> None:
        """Take in one batch, which took ``seconds``; waits until its figures have arrived."""
        config = self._config
        stages = tuple(
            StageRow(stage.busy_fraction, stage.num_versions, stage.peak_bytes)
            for stage in result.stage_metrics() or ()
        )
        size = config.training.global_batch_size
        self._samples = self._start.position(result.batch + 1, size)
        tokens_per_second = size * self._length / seconds
        flops = self._flops_per_token * tokens_per_second / config.num_ranks
        is_skipped = bool(result.is_skipped)
        self._num_skipped += is_skipped
        row = BatchRow(
            batch=result.batch,
            loss=float(result.loss),
            grad_norm=result.grad_norm,
            lr=lr_at(result.batch, config.optimizer, config.training.num_batches),
            tokens_per_second=tokens_per_second,
            tflops=flops / 1e12,
            mfu=None if self._peak_flops is None else flops / self._peak_flops,
            samples=self._samples,
            num_skipped=self._num_skipped,
            stages=stages,
        )
        self._num_batches = result.batch + 1
        self._loss = row.loss
        if note := self._divergence.add(row.batch, row.loss, is_skipped):
            self._progress.note(f"warning: {note}")
        self._averages.add(stages)
        self._metrics.write(row)
        self._progress.update(row)
        self._recent.add(row)
        if self._is_logged():
            shown = self._recent.take()
            self._progress.log(shown)
            if self._board:
                self._board.write_batch(shown)

    def _is_logged(self) -> bool:
        """Whether the last batch is one to show: the first, the last, every ``log_every``."""
        training = self._config.training
        done = self._num_batches
        return done % training.log_every == 0 or done in (1, training.num_batches)

    def validated(self, num_batches: int, loss: float, accuracy: float | None) -> None:
        """Take in the validation loss after ``num_batches``, and the accuracy of classes."""
        row = ValidationRow(num_batches, self._samples, loss, perplexity(loss), accuracy)
        self._validations.append(row)
        self._metrics.write(row)
        if self._board:
            self._board.write_validation(row)
        beside = f"perplexity: {row.validation_perplexity:.4g}"
        if accuracy is not None:
            beside = f"accuracy: {accuracy:.4f}"
        self._progress.note(f"validate step: {num_batches}  loss: {loss:.4f}  {beside}")

    def keep_best(self, weights: dict[str, Tensor]) -> None:
        """Keep the weights that were just validated: they are the best so far."""
        save_weights(weights, self._config.model.size(), self._folder / BEST_WEIGHTS)

    def finish(self, outcome: Outcome) -> None:
        """Write the results, the summary last, and say what came of the run. Weights that are not
        finite are of no use and not saved."""
        has_finite_weights = all(bool(w.isfinite().all()) for w in outcome.weights.values())
        loss = self._validations[-1].validation_loss if self._validations else 0.0
        self._divergence.end(self._num_batches, loss, has_finite_weights, outcome.non_finite)
        if has_finite_weights:
            save_weights(outcome.weights, self._config.model.size(), self._folder / WEIGHTS)
        write_json(self._folder / TIMELINE, chrome_trace(outcome.timeline), indent=None)
        summary = self._summary(outcome)
        write_json(self._folder / SUMMARY, asdict(summary))
        self._progress.close()
        self._progress.note(describe(summary, self._folder, self._command))

    def _summary(self, outcome: Outcome) -> Summary:
        training = self._config.training
        tokens = self._samples * self._length
        seconds = self._seconds + outcome.seconds
        losses = {row.num_batches: row.validation_loss for row in self._validations}
        accuracies = {row.num_batches: row.validation_accuracy for row in self._validations}
        # A BERT cannot write text, nor can a model that has failed.
        writes = isinstance(self._config.model.size(), GPTConfig) and self.failure is None
        best = best_of(self._validations)
        return Summary(
            schedule=self._config.parallel.schedule,
            num_batches=self._num_batches,
            samples=self._samples,
            tokens=tokens,
            num_skipped=self._num_skipped,
            is_stopped_early=self._num_batches < training.num_batches,
            failure=self.failure,
            validation_loss_start=finite(losses.get(0)),
            validation_loss_end=finite(losses.get(self._num_batches)),
            validation_loss_best=best.validation_loss if best else None,
            best_num_batches=best.num_batches if best else None,
            validation_accuracy_start=accuracies.get(0),
            validation_accuracy_end=accuracies.get(self._num_batches),
            train_loss_end=finite(self._loss),
            loss_unit=loss_unit(self._config),
            tokens_per_second=tokens / seconds,
            train_seconds=seconds,
            stages=self._averages.summaries(self._split),
            prompt=PROMPT if writes else "",
            sample=self._sample(outcome.weights) if writes else "",
        )

    def _sample(self, weights: dict[str, Tensor]) -> str:
        """What the model goes on with after `PROMPT`; nothing if its training has diverged."""
        size = self._config.model.size()
        model = model_with(size, weights)
        try:
            text = generate(
                model, PROMPT.encode(), _SAMPLE_TOKENS, sequence_length=size.sequence_length
            )
        except ValueError as error:
            self._progress.note(f"no sample: {error}")
            return ""
        return PROMPT + readable(text)


def loss_unit(config: Config) -> str:
    """What the losses of a run are measured in."""
    size = config.model.size()
    if not isinstance(size, BertConfig):
        return "nats a byte"
    return "nats a snippet" if size.num_classes else "nats a masked byte"


def best_of(validations: list[ValidationRow]) -> ValidationRow | None:
    """The first with the lowest loss of those after the start; None without one that is finite."""
    rows = [row for row in validations if row.num_batches and math.isfinite(row.validation_loss)]
    return min(rows, key=lambda row: row.validation_loss, default=None)


def readable(text: bytes) -> str:
    """Text that a model wrote, fit for a terminal: what is not UTF-8 or not printable is marked."""
    return "".join(
        character if character.isprintable() or character in "\n\t" else "\N{REPLACEMENT CHARACTER}"
        for character in text.decode("utf-8", errors="replace")
    )


def describe(summary: Summary, folder: Path, command: str) -> str:
    """What a run has come to, for a person who calls this program by ``command``."""
    lines = [
        f"{summary.num_batches:,} batches, {summary.tokens:,} tokens in "
        f"{duration(summary.train_seconds)}: {summary.tokens_per_second:,.0f} tokens/s",
    ]
    if summary.validation_loss_start is not None:
        end = summary.validation_loss_end
        lines.append(
            f"validation loss {summary.validation_loss_start:.4f} at the start, "
            f"{'not finite' if end is None else f'{end:.4f}'} at the end, in {summary.loss_unit}"
        )
    start, end = summary.validation_accuracy_start, summary.validation_accuracy_end
    if start is not None and end is not None:
        lines.append(f"validation accuracy {start:.1%} at the start, {end:.1%} at the end")
    lines += [
        f"stage {index}: {stage.num_layers} layers, busy {stage.busy_fraction:.1%}, "
        f"{_versions(stage.num_versions)} held, peak {stage.peak_bytes / 2**20:,.0f} MiB"
        for index, stage in enumerate(summary.stages)
    ]
    use = ""
    if summary.prompt:
        lines.append(f"a sample after {summary.prompt!r}:")
        lines += [f"  | {line}" for line in summary.sample.splitlines()]
        words = ["sample", str(folder), "--prompt", summary.prompt]
        use = f" ({command} {shlex.join(words)})"
    is_saved = (folder / WEIGHTS).is_file()
    lines += [
        f"timeline  {folder / TIMELINE} (open it in ui.perfetto.dev)",
        f"report    {command} {shlex.join(['report', str(folder)])} (writes one page on all of it)",
        f"weights   {folder / WEIGHTS}{use}" if is_saved else "weights   not saved: not finite",
    ]
    if (best := folder / BEST_WEIGHTS).is_file():
        lines.append(
            f"best      {best} (validation loss {summary.validation_loss_best:.4f} after "
            f"{summary.best_num_batches:,} batches)"
        )
    return "\n".join(lines)


def _versions(count: int) -> str:
    return "1 weight version" if count == 1 else f"{count} weight versions"


@contextmanager
def _warnings_noted(progress: Progress) -> Iterator[None]:
    """Show what this package warns of; what others warn of goes to the log, as ever."""
    with warnings.catch_warnings():
        log = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if filename.startswith(_PACKAGE):
                progress.note(f"warning: {message}")
            else:
                log(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        yield
