"""Schedules for property tests: every generated one, and garbage."""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from twobw.core.generators import SCHEDULES, generate, options_of
from twobw.core.lowering import lower
from twobw.core.ops import Op, OpKind
from twobw.core.schedule import Schedule


@st.composite
def names_and_options(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    name = draw(st.sampled_from(list(SCHEDULES)))
    values = {
        "extra_in_flight": st.integers(0, 2),
        "defer_update": st.booleans(),
        "update_lag": st.integers(0, 4),
    }
    return name, {option: draw(values[option]) for option in options_of(name)}


@st.composite
def generated(draw: st.DrawFn) -> Schedule:
    """Any schedule that a generator makes, of compute ops alone."""
    name, options = draw(names_and_options())
    num_stages, num_microbatches = draw(st.integers(1, 6)), draw(st.integers(1, 9))
    return generate(name, num_stages, num_microbatches, draw(st.integers(1, 5)), **options)


@st.composite
def generated_or_lowered(draw: st.DrawFn) -> Schedule:
    schedule = draw(generated())
    lowering = draw(st.sampled_from(["none", "transfers", "transfers and reductions"]))
    if lowering == "none":
        return schedule
    return lower(schedule, reduce=lowering == "transfers and reductions")


small = st.integers(-2, 5)
limits = st.lists(st.integers(-1, 4), max_size=4).map(tuple)
garbage_ops = st.builds(Op, st.sampled_from(OpKind), small, small | st.integers(), small, small)
garbage = st.builds(
    Schedule,
    name=st.sampled_from([*SCHEDULES, "unheard-of"]),
    num_stages=small,
    num_microbatches=small,
    num_batches=small | st.integers(),
    microbatches_per_update=small,
    num_versions=limits,
    max_in_flight=limits,
    num_gradient_buffers=small,
    programs=st.lists(st.lists(garbage_ops, max_size=12).map(tuple), max_size=4).map(tuple),
    options=st.lists(
        st.tuples(st.sampled_from(["extra_in_flight", "update_lag", "unheard-of"]), small),
        max_size=2,
    ).map(tuple),
    backward_on_newest=st.booleans(),
)


@st.composite
def scrambled(draw: st.DrawFn) -> Schedule:
    """A sound declaration with nonsense programs."""
    schedule = draw(generated())
    stages = st.integers(0, schedule.num_stages - 1)
    ops = st.builds(Op, st.sampled_from(OpKind), stages, st.integers(0, 9), small, small)
    program = st.lists(ops, max_size=30).map(tuple)
    programs = st.lists(program, min_size=1, max_size=schedule.num_stages + 1).map(tuple)
    return replace(schedule, programs=draw(programs))
