"""Where ranks stand in a cluster, and what the links between them are worth to each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from twobw.core.costs import LinkCost
from twobw.core.rank_grid import Placement
from twobw.planner.cluster import ClusterSpec
from twobw.profiler.profile import LinkProfile


@dataclass(frozen=True, slots=True)
class Ring:
    """What replicas of a stage have to sum gradients over.

    Attributes:
        size: replicas.
        latency_ns: of a message from one to the next.
        bytes_per_second: of the slowest of the links.
    """

    size: int
    latency_ns: int
    bytes_per_second: float

    def all_reduce_ns(self, num_bytes: float) -> int:
        """Of a ring: every replica sends and takes each byte nearly twice (Patarasu and Yuan,
        2009)."""
        if self.size == 1:
            return 0
        steps = 2 * (self.size - 1)
        sent = steps * num_bytes / self.size
        return round(sent / self.bytes_per_second * 1e9) + steps * self.latency_ns

    def broadcast_ns(self, num_bytes: float) -> int:
        """Shares of all replicas to all others, each byte once around."""
        steps = self.size - 1
        sent = steps * num_bytes / self.size
        return round(sent / self.bytes_per_second * 1e9) + steps * self.latency_ns


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The links that one pipeline has.

    Attributes:
        links: between stage ``s`` and ``s + 1``.
        rings: of each stage's replicas.
        slowest_link: of the links; a free one if there is none.
        slowest_ring: of the rings.
    """

    links: tuple[LinkCost, ...]
    rings: tuple[Ring, ...]
    slowest_link: LinkCost
    slowest_ring: Ring


@lru_cache(maxsize=4096)
def surroundings(cluster: ClusterSpec, pp: int, dp: int, placement: Placement) -> Surroundings:
    """What the slowest of the ``dp`` pipelines finds.

    Devices of a node share its link to the others: of the replicas of a stage those of one node
    send at the same time, and so do the rings of all stages that a node has some but not all
    replicas of.

    Args:
        cluster: the devices; the first ``pp * dp`` are used.
        pp: stages.
        dp: replicas of each.
        placement: ``"replicas"``: device ``stage * dp + replica``; ``"pipelines"``: device
            ``replica * pp + stage``.
    """
    devices = np.arange(pp * dp)
    grid = devices.reshape(pp, dp) if placement == "replicas" else devices.reshape(dp, pp).T
    nodes = grid // cluster.devices_per_node
    crossing = nodes[1:] != nodes[:-1]
    links = [
        _link(cluster, _most_in_a_node(nodes[stage][crossing[stage]])) for stage in range(pp - 1)
    ]
    spread = nodes.min(axis=1) != nodes.max(axis=1)
    stages_in_node = _most_in_a_node(
        np.concatenate([np.unique(row) for row in nodes[spread]]) if spread.any() else devices[:0]
    )
    rings = [
        _ring(cluster.link(crosses=bool(wide)), dp, stages_in_node if wide else 1)
        for wide in spread
    ]
    return Surroundings(
        tuple(links),
        tuple(rings),
        min(links, key=lambda link: link.bytes_per_second, default=LinkCost()),
        min(rings, key=lambda ring: ring.bytes_per_second),
    )


def group_link(cluster: ClusterSpec, stages: Sequence[int], where: Surroundings) -> Ring:
    """What some stages of a pipeline have to reduce something together: as slow as the slowest
    link on the way."""
    between = where.links[min(stages) : max(stages)]
    if not between:
        return Ring(1, 0, cluster.inside.bytes_per_second)
    slowest = min(link.bytes_per_second for link in between)
    return Ring(len(stages), max(link.latency_ns for link in between), slowest)


def _most_in_a_node(nodes: npt.NDArray[np.int64]) -> int:
    return int(np.unique(nodes, return_counts=True)[1].max(initial=0))


def _link(cluster: ClusterSpec, num_sharing: int) -> LinkCost:
    link = cluster.link(crosses=num_sharing > 0)
    return LinkCost(
        latency_ns=link.latency_ns, bytes_per_second=link.bytes_per_second / max(num_sharing, 1)
    )


def _ring(link: LinkProfile, size: int, num_sharing: int) -> Ring:
    return Ring(size, link.latency_ns, link.bytes_per_second / num_sharing)
