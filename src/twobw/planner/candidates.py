"""All that the planner may choose among, each with the time that a closed form gives it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, product

import numpy as np

from twobw.core.generators import NEVER_DRAINING, stage_rule
from twobw.core.rank_grid import Placement
from twobw.planner.closed_form import Sizes, estimate_ns
from twobw.planner.cluster import ClusterSpec
from twobw.planner.configuration import (
    Configuration,
    Recompute,
    Training,
    known_options,
)
from twobw.planner.costing import layer_ns
from twobw.planner.partition import Costs, least_costs, stage_costs
from twobw.planner.placement import group_link, surroundings
from twobw.profiler.profile import ModelProfile

SCHEDULES = ("2bw-fresh", "2bw", "paci", "1f1b", "gpipe", "no-pipeline")
"""That are chosen among unless others are asked for; of equally fast ones the first."""

_LEANEST = ("no-pipeline", "1f1b")  # of one version, with the fewest microbatches in flight
_MOST_WIDTHS = 3  # numbers of replicas that are looked at for a depth, the largest ones
_MOST_EXTRA = 2


@dataclass(frozen=True, slots=True)
class Candidate:
    """A configuration and its estimated time of a batch."""

    configuration: Configuration
    estimate_ns: float


class Candidates:
    """The candidates for a model on a cluster.

    Args:
        profile: of the model.
        cluster: the devices.
        training: what is given.
        schedules: to choose among.
    """

    def __init__(
        self,
        profile: ModelProfile,
        cluster: ClusterSpec,
        training: Training,
        schedules: Sequence[str] = SCHEDULES,
    ) -> None:
        self._profile, self._cluster, self._training = profile, cluster, training
        self._schedules = schedules
        layers = [profile.layer(index) for index in range(profile.num_layers)]
        self._update_ns = sum(layer.update_ns for layer in layers)
        self._gradient_bytes = sum(layer.gradient_bytes for layer in layers)
        self.costs = lru_cache(maxsize=None)(self._costs)
        self._least = lru_cache(maxsize=None)(self._least_costs)
        self._ties = lru_cache(maxsize=None)(self._ties_ns)

    @property
    def recomputes(self) -> tuple[Recompute, ...]:
        """What may be run again."""
        kept: Recompute = "attention" if self._profile.recomputes_attention else "none"
        return (kept, "layer", "stage")

    def all(self) -> list[Candidate]:
        """By estimated time, the shortest first."""
        found = [
            Candidate(configuration, self.estimate_ns(configuration))
            for configuration in self.configurations()
        ]
        return sorted(found, key=lambda candidate: candidate.estimate_ns)

    def configurations(self) -> Iterator[Configuration]:
        """Those whose numbers go into each other."""
        for pp in range(1, min(self._profile.num_layers, self._cluster.num_devices) + 1):
            for size, recompute in product(self._profile.microbatch_sizes, self.recomputes):
                if pp == 1 and recompute == "stage":
                    continue  # keeps the input of the whole model alone, and has it all again
                for dp, m in self.widths(pp, size):
                    for schedule, extra in self._orders(pp, m, recompute):
                        for placement in self._placements(pp, dp):
                            yield Configuration(
                                pp, dp, size, m, schedule, recompute, extra, 0, placement
                            )

    def leanest_schedules(self, pp: int) -> Sequence[str]:
        """Those of the schedules that may need the least memory."""
        if pp == 1:
            return ("1f1b",)
        leanest = next((name for name in _LEANEST if name in self._schedules), None)
        return self._schedules if leanest is None else (leanest,)

    def costs_for(self, configuration: Configuration) -> Costs:
        """Of all stages that there can be: what the split is to even out."""
        crosses = configuration.pp * configuration.dp > self._cluster.devices_per_node
        found: Costs = self.costs(configuration.microbatch_size, configuration.recompute, crosses)
        return found

    def widths(self, pp: int, microbatch_size: int) -> list[tuple[int, int]]:
        """Numbers of replicas, each with the number of microbatches."""
        num_samples = self._training.global_batch_size
        most = self._cluster.num_devices // pp
        if num_samples % microbatch_size:
            return []
        total = num_samples // microbatch_size
        widths = (dp for dp in range(min(most, total), 0, -1) if total % dp == 0)
        return [(dp, total // dp) for dp, _ in zip(widths, range(_MOST_WIDTHS), strict=False)]

    def _orders(self, pp: int, m: int, recompute: Recompute) -> Iterator[tuple[str, int]]:
        """Schedules, each with its extra microbatches in flight. Those that never drain need as
        many microbatches as stages; else they are slower, or none of stage 0's gradient is
        fresh."""
        if pp == 1:
            yield "1f1b", 0  # data parallelism: nothing to pipeline, no reason for older weights
            return
        for schedule in self._schedules:
            if schedule in NEVER_DRAINING and m < pp:
                continue
            if recompute != "none" and stage_rule(schedule, 0, pp, m).backward_on_newest:
                continue
            most = _MOST_EXTRA if "extra_in_flight" in known_options(schedule) else 0
            yield from ((schedule, extra) for extra in range(most + 1))

    def _placements(self, pp: int, dp: int) -> tuple[Placement, ...]:
        is_one = pp == 1 or dp == 1 or pp * dp <= self._cluster.devices_per_node
        return ("replicas",) if is_one else ("replicas", "pipelines")

    def _costs(self, microbatch_size: int, recompute: Recompute, crosses: bool) -> Costs:
        """A stage's compute; and where messages at its borders are larger than they need be, the
        time that this takes more."""
        layers = [self._profile.layer(index) for index in range(self._profile.num_layers)]
        recomputes = recompute in ("layer", "stage")
        times = [sum(layer_ns(layer, microbatch_size, recomputes=recomputes)) for layer in layers]
        times[-1] += sum(layer_ns(self._profile.loss, microbatch_size, recomputes=False))
        sent = [layer.at(microbatch_size).output_bytes for layer in layers[:-1]]
        link = self._cluster.link(crosses=crosses)
        least = min(sent, default=0)
        borders = [(num_bytes - least) / link.bytes_per_second * 1e9 for num_bytes in sent]
        return stage_costs(times, [0.0, *borders, 0.0])

    def _least_costs(
        self, microbatch_size: int, recompute: Recompute, crosses: bool
    ) -> tuple[list[float], float, float]:
        """For each number of stages the dearest one's; the whole model's; the bytes of a message
        in the middle."""
        costs = self.costs(microbatch_size, recompute, crosses)
        layers = self._profile.layers
        middle = self._profile.layer(len(layers) // 2).at(microbatch_size).output_bytes
        return least_costs(costs), float(costs[0, -1]), float(middle)

    def estimate_ns(
        self, configuration: Configuration, split: Sequence[int] | None = None
    ) -> float:
        """Time of a batch by closed form: of the split given, or as if the best one fitted."""
        pp = configuration.pp
        crosses = pp * configuration.dp > self._cluster.devices_per_node
        least, whole, message_bytes = self._least(
            configuration.microbatch_size, configuration.recompute, crosses
        )
        where = surroundings(self._cluster, pp, configuration.dp, configuration.placement)
        overhead = self._profile.overhead
        op_ns = 2 * overhead.op_ns + 4 * overhead.message_ns * (pp > 1)
        link = where.slowest_link
        transfer_ns = link.occupied_ns(round(message_bytes)) + link.latency_ns
        dearest = least[pp - 1] if split is None else self._dearest(configuration, split)
        sizes = Sizes(
            dearest_ns=dearest + op_ns,
            whole_ns=whole + pp * op_ns,
            transfer_ns=transfer_ns,
            update_ns=self._update_ns / pp + overhead.batch_ns,
            reduce_ns=where.slowest_ring.all_reduce_ns(self._gradient_bytes / pp)
            + self._ties(pp, configuration.dp, configuration.placement),
        )
        overlaps = self._training.overlap_reduce and pp > 1
        return estimate_ns(configuration, sizes, overlaps=overlaps)

    def _ties_ns(self, pp: int, dp: int, placement: Placement) -> int:
        """Of the gradients of parameters whose layers cannot be on one stage."""
        num_layers = self._profile.num_layers
        apart = [
            tie.num_parameters
            for tie in self._profile.ties
            if tie.layers[-1] - tie.layers[0] > num_layers - pp
        ]
        where = surroundings(self._cluster, pp, dp, placement)
        link = group_link(self._cluster, (0, pp - 1), where)
        return sum(link.all_reduce_ns(4 * count) for count in apart)

    def _dearest(self, configuration: Configuration, split: Sequence[int]) -> float:
        costs = self.costs_for(configuration)
        ends = list(accumulate(split))
        return max(float(costs[end - n, end]) for end, n in zip(ends, split, strict=True))


def least_bytes(totals: Sequence[np.ndarray]) -> int:
    """The least memory that the fullest stage can have, over all splits.

    Args:
        totals: for each stage ``[i, j]``, bytes with the layers ``i <= layer < j``.
    """
    never = np.iinfo(np.int64).max
    upper = np.triu(np.ones_like(totals[0], dtype=bool), 1)
    best = np.where(upper, totals[0], never)[0]
    for table in totals[1:]:
        best = np.maximum(best[:, None], np.where(upper, table, never)).min(axis=0)
    return int(best[-1])
