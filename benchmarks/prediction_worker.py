"""The measured processes of `prediction.py` and `regret.py`: each is one stage.

Imports of torch stay in the methods: the parent of these processes must stay small.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

from harness import Seat
from memory_worker import check_baseline, peak_bytes

from twobw.config import Config
from twobw.core.costs import LinkCost, OverheadCost, PipelineCost, StageCost

_NUM_SLEEPS = 12
_TIMEOUT_S = 60.0
_NUM_BATCHES = 3  # for the peak of memory


class Process:
    """What tells how much of the machine is its own."""

    def cpu_seconds(self) -> float:
        """Processor time so far."""
        return time.process_time()


class Profiling(Process):
    """A process of a team in which layers are profiled.

    Args:
        seat: this process's place.
        config: precision and optimizer, for the overheads that are measured at the start.
    """

    def __init__(self, seat: Seat, config: Config) -> None:
        import torch

        from twobw.profiler.overhead import time_batches

        torch.set_num_threads(1)
        self._device = torch.device("cpu")
        self._batch_times = time_batches(config, self._device)
        seat.join()
        self._rank = seat.rank


class Rank(Profiling):
    """One stage's process, in which layers are profiled and batches are trained by turns."""

    def begin(self, config: Config) -> None:
        """Make ready to profile and to train as a config says."""
        from twobw.profiler.rank import RankProfiler

        size = microbatch_size(config)
        self._profiler = RankProfiler(config, [size], self._device, self._batch_times)
        self._size = size
        self._training = Training(config)

    def turn(self, num_untimed: int, num_timed: int) -> float:
        """Profile for a while, then train; seconds a batch."""
        self._profiler.time_microbatches(self._size)
        return self._training.turn(num_untimed, num_timed)

    def end(self) -> str | None:
        """The profile, on rank 0."""
        self._training.end()
        self._profiler.time_updates()
        profile = self._profiler.profile()
        del self._profiler, self._training
        return profile.to_json() if self._rank == 0 else None


class Contest(Profiling):
    """A process in which many configurations of one model are trained by turns."""

    def __init__(self, seat: Seat, config: Config) -> None:
        super().__init__(seat, config)
        self._trainings: dict[str, Training] = {}

    def profile(self, config: Config, microbatch_sizes: list[int]) -> str:
        """Of the model."""
        from twobw.profiler.rank import RankProfiler
        from twobw.profiler.timing import NUM_ROUNDS

        profiler = RankProfiler(config, microbatch_sizes, self._device, self._batch_times)
        for _ in range(NUM_ROUNDS):
            for size in microbatch_sizes:
                profiler.time_microbatches(size)
        profiler.time_updates()
        return profiler.profile().to_json()

    def add(self, name: str, config: Config) -> None:
        """A configuration."""
        self._trainings[name] = Training(config)

    def turn(self, name: str, num_untimed: int, num_timed: int) -> float:
        """Train; seconds a batch. Nothing stays in flight."""
        seconds = self._trainings[name].turn(num_untimed, num_timed)
        self._trainings[name].drain()
        return seconds


class MemoryRank:
    """One stage's process, for its peak of memory.

    A tiny model is trained first, so that code and caches which come with any model are there
    before the measurement.
    """

    def __init__(self, seat: Seat, config: Config, tiny: Config) -> None:
        seat.join()
        warm_up = Training(tiny)
        warm_up.turn(1, 1)
        warm_up.end()
        self._config = config

    def peak(self) -> int:
        """Bytes above what was there before the model."""
        baseline = peak_bytes()
        check_baseline(baseline)
        training = Training(self._config)
        training.turn(0, _NUM_BATCHES)
        training.end()
        return peak_bytes() - baseline


class Training:
    """A pipeline as a config says, and a batch of noise for it."""

    def __init__(self, config: Config) -> None:
        import torch

        from twobw.training.loop import make_pipeline

        size = config.model.size()
        shape = (config.training.global_batch_size // config.parallel.dp, size.sequence_length)
        generator = torch.Generator().manual_seed(0)
        self._batch = torch.randint(size.vocab_size, shape, generator=generator)
        self._pipeline = make_pipeline(config)

    def turn(self, num_untimed: int, num_timed: int) -> float:
        """Seconds a batch. ``train_step`` returns after the last forward of a batch on this
        rank, where the clock starts and stops: between lie just the timed batches."""
        for _ in range(num_untimed):
            self._pipeline.train_step(self._batch, self._batch)
        start = time.perf_counter()
        for _ in range(num_timed):
            self._pipeline.train_step(self._batch, self._batch)
        return (time.perf_counter() - start) / num_timed

    def drain(self) -> None:
        """Finish what is in flight."""
        self._pipeline.drain()

    def end(self) -> None:
        """And nothing more will come."""
        self._pipeline.drain()
        self._pipeline.close()


def microbatch_size(config: Config) -> int:
    """In samples."""
    parallel = config.parallel
    return config.training.global_batch_size // (parallel.num_microbatches * parallel.dp)


@dataclass(frozen=True)
class Emulated:
    """A pipeline of layers that sleep.

    Attributes:
        schedule: its name.
        split: layers of each stage.
        num_microbatches: of a batch.
        layer_seconds: of a layer's forward; its backward takes twice that.
        delay_seconds: of each message.
        extra_in_flight: of the schedule.
    """

    schedule: str
    split: tuple[int, ...]
    num_microbatches: int
    layer_seconds: float
    delay_seconds: float = 0.0
    extra_in_flight: int = 0


class EmulatedRank(Process):
    """One stage's process of sleeping layers.

    Args:
        seat: this process's place.
        run: what is emulated.
        config: for the overheads that are measured at the start.
    """

    def __init__(self, seat: Seat, run: Emulated, config: Config) -> None:
        import torch
        from emulated import SleepingLayer, SlowLinks

        from twobw import Pipeline
        from twobw.profiler.overhead import LONG_MESSAGE_BYTES, time_batches, time_link

        torch.set_num_threads(1)
        device = torch.device("cpu")
        op_ns, batch_ns = time_batches(config, device)
        seat.join()
        self._link, message_ns = time_link(device, LONG_MESSAGE_BYTES, _TIMEOUT_S)
        self._overhead = OverheadCost(op_ns, message_ns, batch_ns)
        self._seat, self._run = seat, run
        self._samples: list[tuple[int, int]] = []
        if run.delay_seconds:
            SlowLinks(run.delay_seconds).install()
        self._layer = SleepingLayer(run.layer_seconds)
        self._pipeline = Pipeline(
            [lambda: SleepingLayer(run.layer_seconds)] * sum(run.split),
            torch.nn.functional.mse_loss,
            lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            schedule=run.schedule,
            num_microbatches=run.num_microbatches,
            split=run.split,
            extra_in_flight=run.extra_in_flight,
        )

    def turn(self, num_untimed: int, num_timed: int) -> float:
        """Time a layer's sleep as often as a run has it, then train; seconds a batch."""
        import torch
        from emulated import WIDTH

        self._time_layer()
        batch = torch.ones(self._run.num_microbatches, WIDTH)
        for _ in range(num_untimed):
            self._pipeline.train_step(batch, batch)
        start = time.perf_counter()
        for _ in range(num_timed):
            self._pipeline.train_step(batch, batch)
        return (time.perf_counter() - start) / num_timed

    def end(self) -> PipelineCost | None:
        """What was measured of layers, overheads and the link, on rank 0."""
        import torch.distributed as dist

        self._pipeline.drain()
        self._pipeline.close()
        parts = [self._samples] * self._seat.size
        dist.all_gather_object(parts, self._samples)
        samples = [sample for part in parts for sample in part]
        forward, backward = (round(median(kind)) for kind in zip(*samples, strict=True))
        delay_ns = round(self._run.delay_seconds * 1e9)
        link = LinkCost(
            latency_ns=self._link.latency_ns + delay_ns,
            bytes_per_second=self._link.bytes_per_second,
        )
        stages = [StageCost(count * forward, count * backward) for count in self._run.split]
        return PipelineCost.of(self._seat.size, stages, link, self._overhead)

    def _time_layer(self) -> None:
        import torch
        from emulated import WIDTH

        value = torch.ones(1, WIDTH, requires_grad=True)
        for _ in range(_NUM_SLEEPS):
            start = time.monotonic_ns()
            output = self._layer(value)
            between = time.monotonic_ns()
            output.backward(torch.ones_like(output))
            self._samples.append((between - start, time.monotonic_ns() - between))
