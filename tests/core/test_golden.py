"""Grids written by hand from the rules of the schedules; spacing does not matter.

A file's name says what it draws: ``2bw-p4-m2-n3.txt`` is 2BW of 4 stages, 2 microbatches a batch,
3 batches; a last word is an option that is on.
"""

import inspect
import re
from pathlib import Path

import pytest

from twobw.core.generators import SCHEDULES, generate
from twobw.core.grid import format_grid, parse_grid
from twobw.core.schedule import Schedule

FILES = sorted((Path(__file__).parent / "golden").glob("*.txt"))
NAME = re.compile(r"(.+)-p(\d+)-m(\d+)-n(\d+)(?:-(\w+))?")


def generate_as_named(file: Path) -> Schedule:
    match = NAME.fullmatch(file.stem)
    assert match is not None, file
    options = {match[5]: True} if match[5] else {}
    return generate(match[1], int(match[2]), int(match[3]), int(match[4]), **options)


def cells(grid: str) -> list[list[str]]:
    return [line.split() for line in grid.splitlines()]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_generator_gives_the_grid_written_by_hand(file: Path) -> None:
    schedule = generate_as_named(file)
    assert cells(format_grid(schedule)) == cells(file.read_text())
    assert parse_grid(file.read_text(), schedule) == schedule


def test_every_schedule_has_a_golden_grid() -> None:
    assert {generate_as_named(file).name for file in FILES} == set(SCHEDULES)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_drawing_in_a_docstring_is_what_is_printed(name: str) -> None:
    drawing = re.findall(r"(stage \d \|.*)", inspect.getdoc(SCHEDULES[name]) or "")
    num_batches = 3 if any(row.endswith("...") for row in drawing) else 1
    printed = format_grid(generate(name, 2, 2, num_batches)).splitlines()
    assert len(drawing) == 2
    for row, line in zip(drawing, printed, strict=True):
        assert line.startswith(row.removesuffix("...")) if num_batches > 1 else line == row
