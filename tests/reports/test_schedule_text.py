from pathlib import Path
from typing import Any

import pytest

from twobw.core.generators import SCHEDULES, generate
from twobw.core.grid import parse_grid
from twobw.reports.schedule_text import run_schedule_command

SIZES = {"num_stages": 2, "num_microbatches": 2, "num_batches": 2}


def test_a_schedule_is_drawn_with_what_its_stages_hold() -> None:
    text, code = run_schedule_command("2bw", **SIZES)
    assert code == 0
    assert text.splitlines() == [
        "2bw: stages 2, microbatches a batch 2, batches 2",
        "",
        "stage 0 | F0@0  F1@0   .    B0@0  F2@0       B1@0 U1@1  F3@0  B2@0      .      B3@0 U3@2",
        "stage 1 |  .    F0@0  B0@0  F1@0  B1@0 U1@1  F2@0       B2@0  F3@0  B3@0 U3@2",
        "",
        "stage  live versions  peak in flight  busy",
        "0      2 of 2         2 of 2          80%",
        "1      2 of 2         1 of 1          80%",
        "",
        "makespan 15, where a forward takes 1, a backward 2, and all else nothing",
        "legal: the checker finds nothing wrong",
    ]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_legal_and_its_grid_can_be_read_back(name: str) -> None:
    text, code = run_schedule_command(name, **SIZES)
    assert code == 0
    grid = text.split("\n\n")[1]
    expected = generate(name, 2, 2, 2)
    assert parse_grid(grid, expected) == expected


def test_csv() -> None:
    text, code = run_schedule_command("2bw", **SIZES, output_format="csv")
    assert (text, code) == (
        "0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3",
        0,
    )


def test_more_in_flight() -> None:
    text, _ = run_schedule_command("2bw", **SIZES, extra_in_flight=1)
    assert "0      2 of 2         3 of 3" in text


def test_a_later_update() -> None:
    sizes = {"num_stages": 2, "num_microbatches": 4, "num_batches": 2}
    text, code = run_schedule_command("2bw-fresh", **sizes, update_lag=1)
    assert code == 0
    assert "B3@0 F5@0 B4@0 U3@1 F6@1" in " ".join(text.splitlines()[2].split())
    assert "1      1 of 2         1 of 1" in text
    text, code = run_schedule_command("2bw-fresh", **sizes)
    assert code == 0
    assert "1      1 of 1         1 of 1" in text


def test_a_csv_is_checked_as_one_flushed_batch_or_by_a_rule(tmp_path: Path) -> None:
    file = tmp_path / "schedule.csv"
    file.write_text("0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n")
    text, code = run_schedule_command(check_file=file)
    assert (code, text.splitlines()[0]) == (0, "csv: stages 2, microbatches a batch 4, batches 1")
    text, code = run_schedule_command(check_file=file, rule="2bw", num_microbatches=2)
    assert (text, code) == run_schedule_command("2bw", **SIZES)


def test_an_illegal_csv_is_refused_with_the_faulty_cell_marked(tmp_path: Path) -> None:
    file = tmp_path / "schedule.csv"
    file.write_text("0F0,0B1,0F1,0B0\n")
    text, code = run_schedule_command(check_file=file)
    assert code == 1
    assert text.splitlines() == [
        "csv: stages 1, microbatches a batch 2, batches 1",
        "",
        "stage 0 | F0@0  >B1@0<  F1@0  >B0@0< >U1@1<",
        "",
        "rank 0, op 1, B1@0 of stage 0: forward-first: its forward has not run",
        "rank 0, op 3, B0@0 of stage 0: order: it comes after B1; microbatches ascend",
        "rank 0, op 4, U1@1 of stage 0: slot: "
        "it writes slot 0, of version 0, which microbatch 1 still needs",
        "",
        "illegal: 3 violations",
    ]


def test_an_order_that_other_runtimes_run_is_refused_with_the_reason(tmp_path: Path) -> None:
    looped_bfs = (  # as torch's ScheduleLoopedBFS orders 2 stages a rank
        "0F0,0F1,2F0,2F1,,,2B1,2B0,0B1,0B0\n,1F0,1F1,3F0,3F1,3B1,3B0,1B1,1B0\n"
    )
    file = tmp_path / "schedule.csv"
    file.write_text(looped_bfs)
    text, code = run_schedule_command(check_file=file)
    assert code == 1
    assert text.splitlines()[-3:] == [
        "illegal: 4 violations",
        "All are of the rule order: gradients are added in the order of the backwards, and only "
        "ascending microbatches",
        "give the sums of plain training to the bit. Where rounding may differ, as in torch, such "
        "a schedule can run.",
    ]


def test_a_csv_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "schedule.csv"
    file.write_bytes(b"\xef\xbb\xbf0F0,0B0\n")
    text, code = run_schedule_command(check_file=file)
    assert (code, text.splitlines()[2]) == (0, "stage 0 | F0@0  B0@0 U0@1")


def test_a_csv_in_another_encoding_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "schedule.csv"
    file.write_text("0F0,0B0\n", encoding="utf-16")
    with pytest.raises(ValueError, match=r"schedule.csv: byte 0 is not UTF-8; a schedule's CSV"):
        run_schedule_command(check_file=file)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "needs NAME, --stages, --microbatches and --batches, or --check"),
        ({"name": "2bw", "num_stages": 2}, "needs NAME, --stages"),
        ({"name": "2bw", **SIZES, "rule": "2bw"}, "--rule is '2bw'; it has no meaning beside NAME"),
        ({"name": "2bw", "check_file": Path("x.csv")}, "NAME is '2bw'; .* beside --check"),
        ({"check_file": Path("x.csv"), "num_stages": 2}, "--stages is 2; .* beside --check"),
        ({"check_file": Path("x.csv"), "output_format": "csv"}, "--format is 'csv'; .* --check"),
        (
            {"check_file": Path("x.csv"), "rule": "2bw"},
            "--microbatches is None; --check takes both",
        ),
        ({"check_file": Path("x.csv"), "num_microbatches": 2}, "--rule is None and .* takes both"),
        ({"name": "gpipe", **SIZES, "extra_in_flight": 1}, "'gpipe' does not know the option"),
        ({"name": "2bw", **SIZES, "update_lag": 1}, "'2bw' does not know the option 'update_lag'"),
    ],
)
def test_arguments_that_do_not_go_together(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_schedule_command(**arguments)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        run_schedule_command(check_file=tmp_path / "none.csv")
