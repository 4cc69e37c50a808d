"""The CSV notation, held against torch's own reader and writer (torch 2.13)."""

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from torch.distributed.pipelining import schedules as torch_schedules

from tests.core.strategies import generated
from twobw.core.checker import check
from twobw.core.generators import SCHEDULES, generate
from twobw.core.lowering import lower
from twobw.core.ops import OpKind
from twobw.core.schedule import Schedule
from twobw.core.torch_csv import read_csv, write_csv


def dumped_by_torch(pipeline_order: dict[int, Any], file: Path) -> str:
    torch_schedules.PipelineScheduleMulti._dump_csv(
        SimpleNamespace(pipeline_order=pipeline_order),  # type: ignore[arg-type]
        str(file),
    )
    return file.read_text()


def of_torch(name: str, num_ranks: int, num_microbatches: int, num_local_stages: int) -> Any:
    """The order of ops that torch's schedule of this name gives each rank."""
    kind = getattr(torch_schedules, name)
    rounds = max(1, num_microbatches // num_ranks)
    fields = SimpleNamespace(
        _num_stages=num_ranks * num_local_stages,
        _n_microbatches=num_microbatches,
        n_local_stages=num_local_stages,
        pp_group_size=num_ranks,
        microbatches_per_round=num_microbatches // rounds,
    )
    if name == "ScheduleInterleaved1F1B":
        return {r: kind._calculate_single_rank_operations(fields, r) for r in range(num_ranks)}
    return kind._get_pipeline_order(fields)


TORCH_SCHEDULES = [
    ("ScheduleGPipe", 1, 1, 1),
    ("ScheduleGPipe", 4, 6, 1),
    ("ScheduleInterleaved1F1B", 2, 2, 1),  # one stage a rank: 1F1B with more in flight
    ("ScheduleInterleaved1F1B", 4, 8, 1),
    ("ScheduleInterleaved1F1B", 2, 4, 2),
    ("ScheduleInterleaved1F1B", 4, 8, 2),
    ("ScheduleInterleaved1F1B", 4, 8, 3),
]


@pytest.mark.parametrize(("name", "ranks", "microbatches", "local_stages"), TORCH_SCHEDULES)
def test_what_torch_writes_is_read_and_accepted(
    name: str, ranks: int, microbatches: int, local_stages: int, tmp_path: Path
) -> None:
    order = of_torch(name, ranks, microbatches, local_stages)
    text = dumped_by_torch(order, tmp_path / "schedule.csv")
    schedule = read_csv(text)
    assert check(schedule) == []
    assert schedule.num_stages == ranks * local_stages
    assert schedule.num_microbatches == microbatches
    assert {op.version for program in schedule.programs for op in program} == {0, 1}
    for program, actions in zip(schedule.programs, order.values(), strict=True):
        given = [str(action) for action in actions if action is not None and "R" not in str(action)]
        work = [op for op in program if op.kind in (OpKind.FORWARD, OpKind.BACKWARD)]
        assert [f"{op.stage}{op.kind.value}{op.microbatch}" for op in work] == given


def test_torch_writes_the_gpipe_of_our_generator(tmp_path: Path) -> None:
    text = dumped_by_torch(of_torch("ScheduleGPipe", 3, 5, 1), tmp_path / "schedule.csv")
    assert write_csv(read_csv(text)) == write_csv(generate("gpipe", 3, 5, 1))


def test_torchs_own_1f1b_is_judged_as_torch_judges_it(tmp_path: Path) -> None:
    # Schedule1F1B of torch 2.13 writes F1 F2 ... instead of F0 F1 ... for the last stage (it runs
    # by another path). Torch refuses to load that; so does the checker.
    order = of_torch("Schedule1F1B", 3, 6, 1)
    violations = check(read_csv(dumped_by_torch(order, tmp_path / "schedule.csv")))
    try:
        torch_schedules._validate_schedule(order, 3, 3, 6)
    except AssertionError:
        assert "forward-first" in {violation.rule for violation in violations}
    else:
        assert violations == []


@pytest.mark.parametrize("name", SCHEDULES)
def test_torch_reads_what_is_written(name: str, tmp_path: Path) -> None:
    schedule = generate(name, 3, 4, 2)
    rows = csv.reader(write_csv(schedule).splitlines())
    actions = {
        rank: [torch_schedules._Action.from_str(cell) for cell in row]
        for rank, row in enumerate(rows)
    }
    mapping = torch_schedules._validate_schedule(actions, 3, 3, 8)
    assert mapping == {0: 0, 1: 1, 2: 2}
    assert dumped_by_torch(actions, tmp_path / "again.csv").split() == write_csv(schedule).split()


def test_the_notation() -> None:
    assert write_csv(generate("1f1b", 2, 2, 1)) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    assert write_csv(lower(generate("1f1b", 2, 1, 2))) == "0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n"


@given(generated())
def test_versions_and_updates_are_filled_in_from_the_rule(schedule: Schedule) -> None:
    deferred = schedule.num_gradient_buffers > 1
    read = read_csv(
        write_csv(schedule),
        name=schedule.name,
        num_microbatches=schedule.num_microbatches,
        **dict(schedule.options),
    )
    assert check(read) == []
    assert (read.num_stages, read.num_batches) == (schedule.num_stages, schedule.num_batches)
    if not deferred:
        assert read.programs == schedule.programs


def test_forwards_on_the_newest_version_are_filled_in_by_their_place() -> None:
    flushed = write_csv(generate("1f1b", 2, 2, 2))
    schedule = read_csv(flushed, name="paci", num_microbatches=2)
    assert [" ".join(map(str, program)) for program in schedule.programs] == [
        "F0@0 F1@0 B0@0 B1@0 U1@1 F2@1 F3@1 B2@1 B3@1 U3@2",
        "F0@0 B0@0 F1@0 B1@0 U1@1 F2@1 B2@1 F3@1 B3@1 U3@2",
    ]
    assert check(schedule) == []


def test_by_default_a_file_is_one_flushed_batch() -> None:
    schedule = read_csv("\n".join(["0F0, 0F1,,,0B0,0B1,0REDUCE_GRAD", ",1F0,1F1,1B0,1B1", "", ""]))
    assert [" ".join(map(str, program)) for program in schedule.programs] == [
        "F0@0 F1@0 B0@0 B1@0 R1@1 U1@1",
        "F0@0 F1@0 B0@0 B1@0 U1@1",
    ]
    assert (schedule.num_batches, schedule.num_microbatches) == (1, 2)
    assert schedule.num_versions == (1, 1)
    assert {found.rule for found in check(schedule)} == {"reduce"}  # stage 1 reduces nothing


def test_an_order_that_is_no_2bw_is_read_and_judged() -> None:
    flushed = write_csv(generate("1f1b", 2, 2, 2))
    assert check(read_csv(flushed, name="2bw", num_microbatches=2)) == []  # 2BW may drain
    many_in_flight = write_csv(generate("gpipe", 2, 4, 1))
    found = check(read_csv(many_in_flight, name="2bw", num_microbatches=2))
    assert {violation.rule for violation in found} == {"in-flight"}
    short = read_csv("0F0,0B0,0F1,0B1,0F2,0B2", name="2bw", num_microbatches=2)
    assert {violation.rule for violation in check(short)} >= {"once"}


@pytest.mark.parametrize("cell", ["0I1", "0W1", "0UNSHARD", "0SEND_F1", "0F", "F0", "0F1x", "0"])
def test_other_cells_are_refused_by_place(cell: str) -> None:
    with pytest.raises(ValueError, match=f"row 2, cell 3: '{cell}' is not a forward"):
        read_csv(f"0F0,0B0\n1F0,,{cell}")


def test_the_overlapped_cells_of_dualpipe_are_refused() -> None:
    with pytest.raises(ValueError, match=r"row 1, cell 1: '\(0F1;0B0\)OVERLAP_F_B'"):
        read_csv("(0F1;0B0)OVERLAP_F_B")


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", {}, "no cell is of stage 0"),
        ("1F0,1B0", {}, "no cell is of stage 0"),
        ("0F0,99999999999F0", {}, "no cell is of stage 1"),
        ("0F0", {"name": "2bw"}, "give both, or neither"),
        ("0F0", {"num_microbatches": 2}, "give both, or neither"),
        ("0F0", {"name": "2wb", "num_microbatches": 1}, "did you mean '2bw'"),
        ("0F0", {"name": "2bw", "num_microbatches": 0}, "num_microbatches is 0"),
    ],
)
def test_what_cannot_be_read(text: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_csv(text, **options)
