from dataclasses import replace

import pytest
from hypothesis import given

from tests.core.strategies import garbage, generated_or_lowered
from twobw.core.generators import generate
from twobw.core.grid import format_grid, parse_grid
from twobw.core.lowering import lower
from twobw.core.schedule import Schedule
from twobw.core.torch_csv import read_csv

LIKE = generate("1f1b", 2, 2, 1)


def test_columns_line_up() -> None:
    assert format_grid(LIKE).splitlines() == [
        "stage 0 | F0@0  F1@0   .    B0@0      .      B1@0 U1@1",
        "stage 1 |  .    F0@0  B0@0  F1@0  B1@0 U1@1",
    ]


def test_transfers_stand_beside_the_op_they_serve() -> None:
    lowered = lower(generate("2bw", 2, 1, 1), reduce=True)
    assert format_grid(lowered).splitlines() == [
        "stage 0 | F0@0 SA0@0      .                .            RG0@0 B0@0 R0@1 U0@1",
        "stage 1 |     .       RA0@0 F0@0  B0@0 SG0@0 R0@1 U0@1",
    ]


def test_faulty_cells_are_marked_and_read_back() -> None:
    grid = format_grid(LIKE, {(0, 2), (1, 4)})
    assert grid.splitlines() == [
        "stage 0 | F0@0  F1@0   .    >B0@0<       .       B1@0 U1@1",
        "stage 1 |  .    F0@0  B0@0  F1@0    B1@0 >U1@1<",
    ]
    assert parse_grid(grid, LIKE) == LIKE


def test_ops_that_never_run_are_shown_too() -> None:
    programs = (LIKE.programs[0], LIKE.programs[1][2:])  # stage 1 never runs F0, B0
    grid = format_grid(replace(LIKE, programs=programs))
    assert grid.splitlines() == [
        "stage 0 | F0@0  F1@0  B0@0      .      B1@0 U1@1",
        "stage 1 |  .     .    F1@0  B1@0 U1@1",
    ]


def test_rows_are_ranks_where_a_rank_owns_several_stages() -> None:
    schedule = read_csv("0F0,2F0,2B0,0B0\n1F0,1B0\n")
    assert format_grid(schedule).splitlines() == [
        "rank 0 | 0:F0@0    .     2:F0@0  2:B0@0 2:U0@1        .        0:B0@0 0:U0@1",
        "rank 1 |   .     1:F0@0    .           .        1:B0@0 1:U0@1",
    ]
    assert parse_grid(format_grid(schedule), schedule) == schedule


@given(generated_or_lowered())
def test_parse_is_the_inverse(schedule: Schedule) -> None:
    assert parse_grid(format_grid(schedule), replace(schedule, programs=())) == schedule


@given(garbage)
def test_any_schedule_can_be_shown(schedule: Schedule) -> None:
    grid = format_grid(schedule, {(0, 0)})
    assert len(grid.splitlines()) == len(schedule.programs)
    for line, program in zip(grid.splitlines(), schedule.programs, strict=True):
        shown = [text.strip("><") for text in line.split("|")[1].split() if text != "."]
        assert [text.split(":")[-1] for text in shown] == [str(op) for op in program]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stage 1 | F0@0", "does not begin with 'stage 0"),
        ("F0@0 B0@0", "does not begin with 'stage 0"),
        ("stage 0 | F0", "not of the form F3@1"),
        ("rank 0 | F0@0", "does not name its stage"),
    ],
)
def test_what_is_no_grid_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_grid(text, LIKE)
