"""`Mesh`: where one rank stands among stages and replicas, and what it talks through.

A thin layer on torch's DeviceMesh; or, where stages are threads, the same among threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, pairwise

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from twobw.core.rank_grid import RankGrid
from twobw.runtime.collectives import (
    Alone,
    Collective,
    DistributedCollective,
    ThreadCollective,
    ThreadMeeting,
)
from twobw.runtime.distributed import DistributedTransport
from twobw.runtime.transport import ThreadHub, ThreadTransport, Transport
from twobw.runtime.watchdog import Activity, LocalBoard, StoreBoard, Watchdog

StageSet = frozenset[int]


@dataclass(frozen=True, slots=True)
class Mesh:
    """One rank's place.

    Attributes:
        grid: which rank has which stage and replica.
        stage: this rank's.
        replica: this rank's.
        transport: to the other stages of this pipeline.
        replica_transport: to the other replicas of this stage.
        replicas: the ranks of this stage; used by the reduction's thread only.
        stages: the ranks of this pipeline; likewise.
        ties: for each set of stages that share a parameter, their ranks in this pipeline, where
            this stage is one of them; likewise.
        shards: the ranks of this stage once more, for the thread that updates.
        activity: what this rank is at; its watchdog is that of the process.
        device: where this rank computes; ``None``: wherever its layers are.
    """

    grid: RankGrid
    stage: int
    replica: int
    transport: Transport
    replica_transport: Transport
    replicas: Collective
    stages: Collective
    ties: dict[StageSet, Collective]
    shards: Collective
    activity: Activity
    device: torch.device | None = None

    @property
    def pp(self) -> int:
        """Number of stages."""
        return self.grid.pp

    @property
    def dp(self) -> int:
        """Number of replicas of each."""
        return self.grid.dp

    @property
    def rank(self) -> int:
        """Global rank."""
        return self.grid.rank(self.stage, self.replica)

    def fail(self, reason: str) -> None:
        """Let the other ranks know that this one has failed."""
        self.transport.fail(reason)
        self.replica_transport.fail(reason)
        for group in (self.replicas, self.stages, self.shards, *self.ties.values()):
            group.fail()


def distributed_mesh(
    grid: RankGrid, tie_sets: Sequence[StageSet], device: torch.device, timeout: float
) -> Mesh:
    """This process's place in the default process group, which has the grid's ranks.

    Called by all its ranks, with the same arguments.

    Raises:
        TransportError: some rank does not call it in time.
    """
    stage, replica = grid.place(dist.get_rank())
    activity = Activity(dist.get_rank(), stage, timeout)
    _meet(activity, grid.pp * grid.dp)
    sizes = {"pp": grid.pp, "dp": grid.dp}
    names = ("pp", "dp") if grid.placement == "replicas" else ("dp", "pp")
    shape = tuple(sizes[name] for name in names)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    pipelines = [grid.pipeline(replica) for replica in range(grid.dp)]
    replicas = [grid.replicas(stage) for stage in range(grid.pp)]
    ties: dict[StageSet, Collective] = {}
    for stages in tie_sets:
        group, _ = dist.new_subgroups_by_enumeration(
            [[pipeline[s] for s in sorted(stages)] for pipeline in pipelines]
        )
        if stage in stages and group is not None:
            ties[stages] = DistributedCollective(group, device, activity)
    shards, _ = dist.new_subgroups_by_enumeration(replicas)
    control_group = dist.new_group(backend="gloo") if device.type == "cuda" else None
    edges: dict[tuple[int, int], dist.ProcessGroup] = {}
    if device.type == "cuda":
        edges = _edge_groups(pipelines, replica)
    return Mesh(
        grid,
        stage,
        replica,
        DistributedTransport(
            pipelines[replica],
            stage,
            device=device,
            groups=edges,
            control_group=control_group,
            activity=activity,
        ),
        DistributedTransport(
            replicas[stage],
            replica,
            device=torch.device("cpu"),
            groups={},
            control_group=control_group,
            activity=activity,
        ),
        DistributedCollective(mesh.get_group("dp"), device, activity),
        DistributedCollective(mesh.get_group("pp"), device, activity),
        ties,
        DistributedCollective(shards, device, activity),
        activity,
        device if device.type == "cuda" else None,
    )


def thread_meshes(grid: RankGrid, tie_sets: Sequence[StageSet], timeout: float) -> list[Mesh]:
    """The places of the grid's ranks, which are threads of this process, by rank."""
    pp, dp = grid.pp, grid.dp
    activities = [Activity(rank, stage, timeout) for rank, (stage, _) in enumerate(grid.places())]
    Watchdog(activities, LocalBoard(activities), timeout)
    hubs = [ThreadHub(pp) for _ in range(dp)]
    replica_hubs = [ThreadHub(dp) for _ in range(pp)]
    pipelines = [ThreadMeeting(pp, timeout) for _ in range(dp)]
    replicas = [ThreadMeeting(dp, timeout) for _ in range(pp)]
    shards = [ThreadMeeting(dp, timeout) for _ in range(pp)]
    ties = {
        (stages, replica): ThreadMeeting(len(stages), timeout)
        for stages in tie_sets
        for replica in range(dp)
    }
    return [
        Mesh(
            grid,
            stage,
            replica,
            ThreadTransport(hubs[replica], grid.pipeline(replica), stage, activity),
            ThreadTransport(replica_hubs[stage], grid.replicas(stage), replica, activity),
            _membership(replicas[stage], grid.replicas(stage), activity),
            _membership(pipelines[replica], grid.pipeline(replica), activity),
            {
                stages: _membership(
                    ties[stages, replica], [grid.rank(s, replica) for s in sorted(stages)], activity
                )
                for stages in tie_sets
                if stage in stages
            },
            _membership(shards[stage], grid.replicas(stage), activity),
            activity,
        )
        for activity, (stage, replica) in zip(activities, grid.places(), strict=True)
    ]


_NUMBERS = count()  # of the boards in the store; ranks make their pipelines in the same order


def _meet(activity: Activity, num_ranks: int) -> None:
    """Wait until all ranks are here, and give this one a watchdog."""
    board = StoreBoard(num_ranks, f"mesh-{next(_NUMBERS)}")
    watchdog = Watchdog([activity], board, activity.limit)
    others = [rank for rank in range(num_ranks) if rank != activity.rank]
    with activity.waiting("the making of the same pipeline by", others):
        watchdog.wait_for_all()


def _membership(meeting: ThreadMeeting, ranks: Sequence[int], activity: Activity) -> Collective:
    if meeting.size == 1:
        return Alone()
    return ThreadCollective(meeting, ranks, ranks.index(activity.rank), activity)


def _edge_groups(
    pipelines: Sequence[Sequence[int]], replica: int
) -> dict[tuple[int, int], dist.ProcessGroup]:
    """A communicator for each directed edge of this pipeline; made by all ranks, for all."""
    groups: dict[tuple[int, int], dist.ProcessGroup] = {}
    for number, pipeline in enumerate(pipelines):
        for a, b in pairwise(range(len(pipeline))):
            for source, target in ((a, b), (b, a)):
                group = dist.new_group([pipeline[source], pipeline[target]])
                if number == replica:
                    groups[source, target] = group
    return groups
