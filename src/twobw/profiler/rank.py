"""`RankProfiler`: what one rank measures of a `ModelProfile`.

Ranks of one machine share its memory bandwidth and its caches, so that a layer which is timed alone
may be faster than in a run. All ranks therefore measure the same at once, and their samples count
together.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from twobw.config import Config
from twobw.profiler.assembly import Duration, layer_profile, microbatch_profile
from twobw.profiler.footprint import take_footprint
from twobw.profiler.overhead import LONG_MESSAGE_BYTES, time_link
from twobw.profiler.profile import (
    SCHEMA_VERSION,
    LayerProfile,
    LinkProfile,
    ModelProfile,
    OverheadProfile,
)
from twobw.profiler.subject import make_subject
from twobw.profiler.timing import Bench, Kind, Samples


class RankProfiler:
    """One rank of a default process group whose ranks all make the same calls.

    Args:
        config: of the run that the profile is for.
        microbatch_sizes: in samples, ascending.
        device: of this rank.
        batch_times: what `twobw.profiler.overhead.time_batches` has given, before there was a
            process group.
    """

    def __init__(
        self,
        config: Config,
        microbatch_sizes: Sequence[int],
        device: torch.device,
        batch_times: tuple[int, int],
    ) -> None:
        self._config = config
        self._device = device
        self._batch_times = batch_times
        self._subject = make_subject(config, microbatch_sizes)
        self._bench = Bench(self._subject, device)
        self._footprints = {
            (number, size): take_footprint(layer, partial(self._bench.input, number, size))
            for size in microbatch_sizes
            for number, layer in enumerate(self._bench.layers[:-1])
        }

    def time_microbatches(self, microbatch_size: int) -> None:
        """Measure forwards, backwards and recomputes for a while; again, to have more samples."""
        dist.barrier()
        self._bench.time_microbatches(microbatch_size)

    def time_updates(self) -> None:
        """Measure updates."""
        dist.barrier()
        self._bench.time_updates()

    def profile(self) -> ModelProfile:
        """What all ranks have measured. On rank 0 it has the link, too."""
        samples, slowdown = _gathered(self._bench, self._device)
        link, message_ns = self._link()
        op_ns, batch_ns = self._batch_times
        overhead = OverheadProfile(
            op_ns=round(op_ns * slowdown),
            message_ns=round(message_ns * slowdown),
            batch_ns=round(batch_ns * slowdown),
        )
        entries = self._entries(samples, slowdown)
        config, is_cpu = self._config, self._device.type == "cpu"
        return ModelProfile(
            schema_version=SCHEMA_VERSION,
            kind="measured",
            model=config.model.name,
            device=_cpu_name() if is_cpu else torch.cuda.get_device_name(self._device),
            num_threads=config.training.num_threads if is_cpu else 0,
            num_ranks=config.num_ranks,
            slowdown=slowdown,
            precision=config.training.precision,
            optimizer=config.optimizer.name,
            recomputes_attention=config.training.recompute == "attention",
            entries=tuple(entries[:-1]),
            layers=self._subject.layers,
            loss=entries[-1],
            ties=self._subject.ties,
            overhead=overhead,
            link=link,
        )

    def _link(self) -> tuple[LinkProfile | None, int]:
        if self._config.num_ranks == 1:
            return None, 0
        longest = max(footprint.output_bytes for footprint in self._footprints.values())
        timeout_s = self._config.training.timeout_s
        return time_link(self._device, max(longest, LONG_MESSAGE_BYTES), timeout_s)

    def _entries(self, samples: Samples, slowdown: float) -> list[LayerProfile]:
        """Of the distinct layers and the loss: what each takes beyond the trivial layer."""
        trivial, sizes = len(self._bench.layers) - 1, self._subject.microbatch_sizes

        def duration(kind: Kind, number: int, size: int) -> Duration:
            base = Duration.of(samples[kind, trivial, size])
            return Duration.of(samples[kind, number, size]).beyond(base).times(slowdown)

        def recompute(number: int, size: int) -> Duration:
            again = duration("forward again", number, size).plus(
                duration("backward again", number, size)
            )
            plain = duration("forward", number, size).plus(duration("backward", number, size))
            return again.beyond(plain)

        def entry(number: int) -> LayerProfile:
            update = duration("update", number, 0)
            return layer_profile(
                self._bench.layers[number],
                [
                    microbatch_profile(
                        size,
                        self._footprints[number, size],
                        duration("forward", number, size),
                        duration("backward", number, size),
                        recompute(number, size),
                    )
                    for size in sizes
                ],
                update,
                duration("copying update", number, 0).beyond(update),
            )

        return [entry(number) for number in range(trivial)]


def _gathered(bench: Bench, device: torch.device) -> tuple[Samples, float]:
    """The samples of all ranks together, and how much longer they took by the clock."""
    keys = list(bench.samples)  # in the same order on every rank
    parts = gather_numbers([[bench.processor_ns, bench.clock_ns], *bench.samples.values()], device)
    samples = {
        key: [ns for part in parts for ns in part[place]] for place, key in enumerate(keys, 1)
    }
    processor_ns, clock_ns = (sum(part[0][which] for part in parts) for which in range(2))
    return samples, clock_ns / processor_ns


def gather_numbers(rows: list[list[int]], device: torch.device) -> list[list[list[int]]]:
    """Every rank's rows of integers, as many on each rank, of whatever lengths."""
    lengths = torch.tensor([len(row) for row in rows], device=device)
    every_length = [torch.empty_like(lengths) for _ in range(dist.get_world_size())]
    dist.all_gather(every_length, lengths)
    longest = max(int(each.sum()) for each in every_length)
    own = torch.zeros(longest, dtype=torch.int64, device=device)
    flat = [number for row in rows for number in row]
    own[: len(flat)] = torch.tensor(flat, dtype=torch.int64, device=device)
    gathered = [torch.empty_like(own) for _ in every_length]
    dist.all_gather(gathered, own)
    return [
        [piece.tolist() for piece in each[: int(sizes.sum())].split(sizes.tolist())]
        for each, sizes in zip(gathered, every_length, strict=True)
    ]


def _cpu_name() -> str:
    """As Linux has it; elsewhere the architecture at least."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
