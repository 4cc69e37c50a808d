"""A profile measured on this machine, by two processes."""

import pytest

from tests.profiler.support import config
from twobw.profiler.analytic import compute_profile
from twobw.profiler.assembly import Duration
from twobw.profiler.device import DEVICES
from twobw.profiler.measure import measure_profile
from twobw.profiler.profile import ModelProfile


@pytest.fixture(scope="module")
def profile() -> ModelProfile:
    made = config(model__name="gpt-tiny", model__width="64", training__timeout_s="60")
    return measure_profile(made, [1, 8])


def test_says_what_was_measured_and_how(profile):
    assert (profile.kind, profile.model) == ("measured", "gpt-tiny")
    assert (profile.num_ranks, profile.num_threads) == (2, 1)
    assert (profile.precision, profile.optimizer) == ("fp32", "adamw")
    assert profile.layers == (0, 1, 1, 2)
    assert [entry.name for entry in profile.entries] == ["Embedding", "Block", "Head"]


def test_larger_microbatches_take_longer(profile):
    block = profile.layer(1)
    small, large = block.at(1), block.at(8)
    assert 0 < small.forward_ns < large.forward_ns
    assert 0 < small.backward_ns < large.backward_ns
    assert large.recompute_ns > 0
    assert large.forward_spread_ns > 0
    assert block.update_ns > 0


def test_bytes_are_those_of_the_shapes(profile):
    # on the meta device attention is told to be fused, as it is on a CPU
    same = config(model__name="gpt-tiny", model__width="64")
    computed = compute_profile(same, [1, 8], DEVICES["a100-80gb"])
    times = {
        f"{kind}{suffix}_ns"
        for kind in ("forward", "backward", "recompute", "update", "version_copy")
        for suffix in ("", "_spread")
    }
    for number in (0, 3):
        measured, expected = (p.layer(number).model_dump() for p in (profile, computed))
        for dump in (measured, expected):
            for values in (dump, *dump["microbatches"]):
                for name in times & values.keys():
                    del values[name]
        assert measured == expected


def test_the_clock_is_never_faster_than_the_processor(profile):
    assert profile.slowdown > 0.99


def test_overheads_and_link_are_there(profile):
    overhead, link = profile.overhead, profile.link
    assert 0 < overhead.op_ns < overhead.batch_ns
    assert overhead.message_ns > 0
    assert link is not None
    assert link.latency_ns > 0
    assert 1e6 < link.bytes_per_second < 1e12


def test_a_duration_is_the_median_and_the_distance_of_the_quartiles():
    assert Duration.of([10, 50, 20, 40, 30]) == Duration(30, 20)


def test_what_is_below_the_base_is_nothing():
    assert Duration(30, 5).beyond(Duration(10, 1)) == Duration(20, 5)
    assert Duration(30, 5).beyond(Duration(40, 1)) == Duration(0, 5)


def test_durations_follow_each_other():
    assert Duration(30, 5).plus(Duration(20, 2)) == Duration(50, 7)


def test_a_duration_grows_with_its_spread():
    assert Duration(30, 5).times(1.5) == Duration(45, 8)
