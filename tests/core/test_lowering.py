from hypothesis import given

from tests.core.strategies import generated
from twobw.core.checker import check
from twobw.core.generators import generate, stage_program
from twobw.core.lowering import is_lowered, lower, lower_ops, stage_ranks
from twobw.core.schedule import Schedule
from twobw.core.torch_csv import read_csv


def text(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, program)) for program in schedule.programs]


def test_receives_come_just_before_and_sends_just_after() -> None:
    assert text(lower(generate("gpipe", 3, 1, 1))) == [
        "F0@0 SA0@0 RG0@0 B0@0 U0@1",
        "RA0@0 F0@0 SA0@0 RG0@0 B0@0 SG0@0 U0@1",
        "RA0@0 F0@0 B0@0 SG0@0 U0@1",
    ]


def test_a_reduction_follows_the_last_backward_of_its_update() -> None:
    assert text(lower(generate("gpipe", 1, 2, 1), reduce=True)) == ["F0@0 F1@0 B0@0 B1@0 R1@1 U1@1"]
    deferred = lower(generate("2bw", 1, 1, 3, defer_update=True), reduce=True)
    assert text(deferred) == [
        "F0@0 B0@0 R0@1 F1@0 B1@0 R1@2 U0@1 F2@1 B2@1 R2@3 U1@2 U2@3",
    ]


def test_a_lag_leaves_time_between_a_reduction_and_its_update() -> None:
    lowered = lower(generate("2bw-fresh", 2, 2, 2, update_lag=1), reduce=True)
    assert check(lowered) == []
    compute = [op for op in lowered.programs[1] if not op.kind.is_transfer]
    assert " ".join(map(str, compute)) == (
        "F0@0 B0@0 F1@0 B1@0 R1@1 F2@0 B2@0 U1@1 F3@1 B3@1 R3@2 U3@2"
    )


def test_neighbours_on_one_rank_pass_nothing() -> None:
    schedule = read_csv("0F0,1F0,1B0,0B0\n2F0,2B0\n")
    assert stage_ranks(schedule) == (0, 0, 1)
    assert text(lower(schedule)) == [
        "F0@0 F0@0 SA0@0 RG0@0 B0@0 U0@1 B0@0 U0@1",
        "RA0@0 F0@0 B0@0 SG0@0 U0@1",
    ]


@given(generated())
def test_lowering_only_adds(schedule: Schedule) -> None:
    lowered = lower(schedule, reduce=True)
    assert is_lowered(lowered) == (schedule.num_stages > 1)
    assert not is_lowered(schedule)
    for program, source in zip(lowered.programs, schedule.programs, strict=True):
        assert tuple(op for op in program if op.kind.is_compute) == source


def test_a_stream_is_lowered_as_it_comes() -> None:
    stream = stage_program("2bw", 0, 2, 2)
    ops = lower_ops(stream.begin_batch(), [0, 1], microbatches_per_update=2)
    assert str(next(ops)) == "F0@0"
    assert [str(op) for op in ops] == ["SA0@0", "F1@0", "SA1@0"]
