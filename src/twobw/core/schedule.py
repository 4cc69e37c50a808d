"""`Schedule`: every rank's program, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from twobw.core.ops import Op


@dataclass(frozen=True, slots=True)
class Schedule:
    """A finite schedule: one program (tuple of ops) a rank, and what the schedule promises.

    Attributes:
        name: as in the registry of generators; the checker looks the version rule up by it.
        num_stages: pipeline depth ``p``.
        num_microbatches: microbatches of one batch, ``m``.
        num_batches: batches in this finite schedule.
        microbatches_per_update: ``m``, or 1 where every microbatch makes a version.
        num_versions: weight slots of each stage; version ``v`` lives in slot ``v % num_versions``.
        max_in_flight: for each stage, the most microbatches between their forward and backward.
        num_gradient_buffers: how many updates' gradients may be held at once.
        programs: ``programs[rank]`` is that rank's tuple of ops. A rank may own several stages.
        options: ``(name, value)`` of the generator's options that are set; the version rule is
            looked up with them.
        backward_on_newest: backwards run on the newest version, whatever their forward used;
            False: on their forward's.
    """

    name: str
    num_stages: int
    num_microbatches: int
    num_batches: int
    microbatches_per_update: int
    num_versions: tuple[int, ...]
    max_in_flight: tuple[int, ...]
    num_gradient_buffers: int
    programs: tuple[tuple[Op, ...], ...]
    options: tuple[tuple[str, int], ...] = ()
    backward_on_newest: bool = False
