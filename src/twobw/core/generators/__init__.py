"""The schedules, one file each: a pure function from a stage to its `StageRule`.

``SCHEDULES`` is the registry; ``generate`` makes a finite `Schedule`; ``stage_program`` streams
one stage's ops without end.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from difflib import get_close_matches

from twobw.core.generators.gpipe import gpipe
from twobw.core.generators.no_pipeline import no_pipeline
from twobw.core.generators.one_f_one_b import one_f_one_b
from twobw.core.generators.paci import paci
from twobw.core.generators.rule import StageProgram, StageRule
from twobw.core.generators.two_bw import two_bw
from twobw.core.generators.two_bw_fresh import two_bw_fresh
from twobw.core.generators.weight_stashing import weight_stashing
from twobw.core.schedule import Schedule

SCHEDULES: dict[str, Callable[..., StageRule]] = {
    "2bw": two_bw,
    "2bw-fresh": two_bw_fresh,
    "paci": paci,
    "1f1b": one_f_one_b,
    "gpipe": gpipe,
    "weight-stashing": weight_stashing,
    "no-pipeline": no_pipeline,
}

NEVER_DRAINING = frozenset({"2bw", "2bw-fresh", "paci"})
"""The schedules that go on with the next batch before the last one's update: they are at full speed
from ``num_stages - 1`` microbatches on."""


def stage_rule(
    name: str, stage: int, num_stages: int, num_microbatches: int, **options: int
) -> StageRule:
    """The rule of one stage.

    Raises:
        ValueError: an unknown schedule, an option that the schedule does not have, or a size
            below 1.
    """
    if name not in SCHEDULES:
        near = get_close_matches(name, SCHEDULES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"schedule {name!r} is not one of {', '.join(SCHEDULES)}{hint}")
    for size, value in (("num_stages", num_stages), ("num_microbatches", num_microbatches)):
        if value < 1:
            raise ValueError(f"{size} is {value}; it must be at least 1")
    check_options(name, options)
    return SCHEDULES[name](stage, num_stages, num_microbatches, **options)


def check_options(name: str, options: Mapping[str, int]) -> None:
    """Refuse what a schedule of the registry does not take.

    Raises:
        ValueError: an option that the schedule does not have, or a negative value.
    """
    known = options_of(name)
    for option, value in options.items():
        if option not in known:
            has = f"has {', '.join(known)}" if known else "has no options"
            raise ValueError(f"schedule {name!r} does not know the option {option!r}; it {has}")
        if value < 0:
            raise ValueError(f"{option} is {value}; it must be at least 0")


def options_of(name: str) -> list[str]:
    """The options that a schedule of the registry has besides its sizes."""
    return list(inspect.signature(SCHEDULES[name]).parameters)[3:]


def stage_program(
    name: str,
    stage: int,
    num_stages: int,
    num_microbatches: int,
    *,
    first_batch: int = 0,
    **options: int,
) -> StageProgram:
    """One stage's endless program, streamed batch by batch."""
    rule = stage_rule(name, stage, num_stages, num_microbatches, **options)
    return StageProgram(stage, num_microbatches, rule, first_batch)


def generate(
    name: str, num_stages: int, num_microbatches: int, num_batches: int, **options: int
) -> Schedule:
    """A finite schedule of ``num_batches`` batches, drained at its end; rank = stage.

    Raises:
        ValueError: as `stage_rule`, or ``num_batches`` below 1.
    """
    declared = declare(name, num_stages, num_microbatches, num_batches, **options)
    streams = (
        stage_program(name, stage, num_stages, num_microbatches, **options)
        for stage in range(num_stages)
    )
    programs = tuple(
        (*(op for _ in range(num_batches) for op in stream.begin_batch()), *stream.drain())
        for stream in streams
    )
    return replace(declared, programs=programs)


def declare(
    name: str, num_stages: int, num_microbatches: int, num_batches: int, **options: int
) -> Schedule:
    """What the schedule of this name promises, without programs: for programs that come from
    elsewhere.

    Raises:
        ValueError: as `generate`.
    """
    for size, value in (("num_stages", num_stages), ("num_batches", num_batches)):
        if value < 1:
            raise ValueError(f"{size} is {value}; it must be at least 1")
    rules = [
        stage_rule(name, stage, num_stages, num_microbatches, **options)
        for stage in range(num_stages)
    ]
    return Schedule(
        name=name,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        num_batches=num_batches,
        microbatches_per_update=rules[0].microbatches_per_update,
        num_versions=tuple(rule.num_versions for rule in rules),
        max_in_flight=tuple(rule.max_in_flight for rule in rules),
        num_gradient_buffers=2 if any(rule.defer_update for rule in rules) else 1,
        programs=(),
        options=tuple(sorted((option, int(value)) for option, value in options.items())),
        backward_on_newest=rules[0].backward_on_newest,
    )
