"""For each rule schedules that break it, drawn by hand, and the place where it is reported."""

from dataclasses import replace
from typing import Any

import pytest

from twobw.core.checker import Violation, check, format_violations
from twobw.core.generators import declare, generate
from twobw.core.grid import parse_grid
from twobw.core.lowering import lower
from twobw.core.ops import OpKind
from twobw.core.schedule import Schedule

FLUSH = declare("1f1b", 2, 2, 1)
ONE_STAGE = declare("gpipe", 1, 2, 1)
STASHING = replace(declare("gpipe", 1, 1, 2), name="by hand", num_versions=(2,))

# rule, (rank, index) of each violation of it, declaration, programs, other rules broken with it
CASES: list[tuple[str, list[tuple[int | None, int | None]], Schedule, str, set[str]]] = [
    # A stage that does not exist, one on two ranks, one on no rank.
    ("owner", [(0, 4)], FLUSH,
     """rank 0 | 0:F0@0 0:F1@0 0:B0@0 0:B1@0 7:F0@0 0:U1@1
        rank 1 | 1:F0@0 1:B0@0 1:F1@0 1:B1@0 1:U1@1""", set()),
    ("owner", [(1, 0)], FLUSH,
     """rank 0 | 0:F0@0 0:F1@0 0:B0@0 0:B1@0 0:U1@1
        rank 1 | 0:F0@0 1:F0@0 1:B0@0 1:F1@0 1:B1@0 1:U1@1""", set()),
    ("owner", [(None, None)], FLUSH, "stage 0 | F0@0 F1@0 B0@0 B1@0 U1@1", set()),
    # A microbatch too many; an update that names the wrong one.
    ("numbering", [(0, 2), (0, 5)], ONE_STAGE, "stage 0 | F0@0 F1@0 F2@0 B0@0 B1@0 B2@0 U1@1",
     {"version-rule", "in-flight", "gradient-buffers"}),
    ("numbering", [(0, 4)], ONE_STAGE, "stage 0 | F0@0 F1@0 B0@0 B1@0 U0@1", set()),
    ("numbering", [(0, 5)], ONE_STAGE, "stage 0 | F0@0 F1@0 B0@0 B1@0 U1@1 U3@2", {"updates"}),
    # Doubled, missing.
    ("once", [(0, 1)], ONE_STAGE, "stage 0 | F0@0 F0@0 F1@0 B0@0 B1@0 U1@1", set()),
    ("once", [(0, 3)], ONE_STAGE, "stage 0 | F0@0 F1@0 B0@0 B0@0 B1@0 U1@1", set()),
    ("once", [(0, None)], ONE_STAGE, "stage 0 | F0@0 F1@0 B0@0 U1@1", {"updates", "slot"}),
    ("order", [(0, 3)], ONE_STAGE, "stage 0 | F0@0 F1@0 B1@0 B0@0 U1@1", set()),
    ("order", [(0, 1)], ONE_STAGE, "stage 0 | F1@0 F0@0 B0@0 B1@0 U1@1", set()),
    ("forward-first", [(0, 1)], ONE_STAGE, "stage 0 | F0@0 B1@0 F1@0 B0@0 U1@1",
     {"order", "slot"}),
    ("same-version", [(0, 4)], STASHING, "stage 0 | F0@0 B0@0 U0@1 F1@0 B1@1 U1@2", set()),
    ("version-rule", [(0, 3), (0, 4)], declare("2bw", 1, 1, 2),
     "stage 0 | F0@0 B0@0 U0@1 F1@1 B1@1 U1@2", set()),
    # Options are part of the rule: without a lag microbatch 3 of stage 0 runs on version 1.
    ("version-rule", [(0, 5), (0, 8)], declare("2bw-fresh", 2, 2, 2),
     """stage 0 | F0@0 F1@0 B0@0 F2@0 B1@0 F3@0 B2@0 U1@1 B3@0 U3@2
        stage 1 | F0@0 B0@0 F1@0 B1@0 U1@1 F2@1 B2@1 F3@1 B3@1 U3@2""", {"gradient-buffers"}),
    ("version-rule", [(1, 5), (1, 7)], declare("2bw-fresh", 2, 2, 2, update_lag=1),
     """stage 0 | F0@0 F1@0 B0@0 F2@0 B1@0 F3@0 B2@0 U1@1 B3@0 U3@2
        stage 1 | F0@0 B0@0 F1@0 B1@0 U1@1 F2@1 F3@1 B2@1 B3@1 U3@2""", {"in-flight"}),
    # Where backwards run on the newest version: on that of their forward instead; forwards on
    # another than the newest; an update before a backward of its batch.
    ("same-version", [(0, 7)], declare("paci", 2, 2, 2),
     """stage 0 | F0@0 F1@0 B0@0 F2@0 B1@0 U1@1 F3@1 B2@0 B3@1 U3@2
        stage 1 | F0@0 B0@0 F1@0 B1@0 U1@1 F2@1 B2@1 F3@1 B3@1 U3@2""",
     {"version-rule", "buffered", "live-versions"}),
    ("version-rule", [(0, 6)], declare("paci", 2, 2, 2),
     """stage 0 | F0@0 F1@0 B0@0 F2@0 B1@0 U1@1 F3@0 B2@1 B3@1 U3@2
        stage 1 | F0@0 B0@0 F1@0 B1@0 U1@1 F2@1 B2@1 F3@1 B3@1 U3@2""",
     {"buffered", "live-versions"}),
    ("buffered", [(0, 3)], declare("paci", 2, 2, 2),
     """stage 0 | F0@0 F1@0 B0@0 F2@1 B1@0 U1@1 F3@1 B2@1 B3@1 U3@2
        stage 1 | F0@0 B0@0 F1@0 B1@0 U1@1 F2@1 B2@1 F3@1 B3@1 U3@2""", set()),
    ("slot", [(0, 4)], declare("paci", 2, 2, 2),
     """stage 0 | F0@0 F1@0 B0@0 F2@0 U1@1 B1@0 F3@1 B2@1 B3@1 U3@2
        stage 1 | F0@0 B0@0 F1@0 B1@0 U1@1 F2@1 B2@1 F3@1 B3@1 U3@2""",
     {"updates", "buffered", "live-versions", "gradient-buffers"}),
    # Not made yet; overwritten.
    ("buffered", [(0, 2)], declare("gpipe", 1, 1, 2),
     "stage 0 | F0@0 B0@0 F1@1 U0@1 B1@1 U1@2", set()),
    ("buffered", [(0, 3), (0, 4)], replace(STASHING, num_versions=(1,)),
     "stage 0 | F0@0 B0@0 U0@1 F1@0 B1@0 U1@2", {"live-versions"}),
    # Too early, out of turn, missing.
    ("updates", [(0, 3)], ONE_STAGE, "stage 0 | F0@0 F1@0 B0@0 U1@1 B1@0",
     {"slot", "live-versions", "buffered"}),
    ("updates", [(0, 4), (0, 5)], STASHING, "stage 0 | F0@0 B0@0 F1@0 B1@0 U1@2 U0@1",
     {"gradient-buffers"}),
    ("updates", [(0, None)], ONE_STAGE, "stage 0 | F0@0 F1@0 B0@0 B1@0", set()),
    ("slot", [(0, 3)], replace(STASHING, num_versions=(1,), max_in_flight=(2,)),
     "stage 0 | F0@0 F1@0 B0@0 U0@1 B1@0 U1@2", {"buffered", "live-versions"}),
    ("in-flight", [(1, 1)], FLUSH,
     """stage 0 | F0@0 F1@0 B0@0 B1@0 U1@1
        stage 1 | F0@0 F1@0 B0@0 B1@0 U1@1""", set()),
    # When U1 makes version 2, B2 needs version 0 still, and B3 version 1.
    ("live-versions", [(0, 7)], replace(STASHING, num_batches=4, max_in_flight=(3,)),
     "stage 0 | F0@0 F1@0 F2@0 B0@0 U0@1 B1@0 F3@1 U1@2 B2@0 U2@3 B3@1 U3@4",
     {"buffered", "slot"}),
    ("gradient-buffers", [(0, 10)], declare("2bw", 1, 2, 3),
     "stage 0 | F0@0 B0@0 F1@0 B1@0 U1@1 F2@0 B2@0 F3@0 B3@0 F4@1 B4@1 U3@2 F5@1 B5@1 U5@3",
     set()),
    # Blocked by each other; by its own rank.
    ("deadlock", [(0, 1), (1, 1)], replace(FLUSH, max_in_flight=(2, 2)),
     """stage 0 | F0@0 B0@0 F1@0 B1@0 U1@1
        stage 1 | F0@0 F1@0 B0@0 B1@0 U1@1""", set()),
    ("deadlock", [(0, 0)], declare("gpipe", 2, 1, 1),
     "rank 0 | 1:F0@0 0:F0@0 1:B0@0 0:B0@0 0:U0@1 1:U0@1", set()),
]  # fmt: skip


def places(violations: list[Violation], rule: str) -> list[tuple[int | None, int | None]]:
    return [(found.rank, found.index) for found in violations if found.rule == rule]


@pytest.mark.parametrize(("rule", "where", "declared", "grid", "others"), CASES)
def test_a_broken_rule_is_reported_in_its_place(
    rule: str,
    where: list[tuple[int | None, int | None]],
    declared: Schedule,
    grid: str,
    others: set[str],
) -> None:
    schedule = parse_grid(grid, declared)
    violations = check(schedule)
    assert places(violations, rule) == where
    assert {found.rule for found in violations} == {rule} | others


LOWERED = """
stage 0 | F0@0 SA0@0 F1@0 SA1@0 RG0@0 B0@0 RG1@0 B1@0 R1@1 U1@1
stage 1 | RA0@0 F0@0 RA1@0 F1@0 B0@0 SG0@0 B1@0 SG1@0 R1@1 U1@1
"""
GPIPE = declare("gpipe", 2, 2, 1)


@pytest.mark.parametrize(
    ("old", "new", "rule", "where", "others"),
    [
        # Receives and sends that are missing, misplaced, doubled, or serve nothing.
        ("RA1@0 F1@0", "F1@0", "transfer", [(1, 2)], {"edge"}),
        ("F0@0 SA0@0", "F0@0", "transfer", [(0, 0)], {"edge", "deadlock"}),
        ("RA1@0 F1@0", "F1@0 RA1@0", "transfer", [(1, 2)], set()),
        ("B1@0 SG1@0", "SG1@0 B1@0", "transfer", [(1, 7)], set()),
        ("F0@0 SA0@0", "F0@0 SA0@0 SA0@0", "transfer", [(0, 2)], {"edge"}),
        ("| F0@0 SA0", "| SG0@0 F0@0 SA0", "transfer", [(0, 0)], set()),
        ("SG0@0", "SG0@1", "transfer", [(1, 4), (1, 5)], set()),
        # Receives in another order than the sends.
        ("RA0@0 F0@0 RA1@0", "RA1@0 RA0@0 F0@0", "edge", [(1, 0)], set()),
        # A reduction too early, too late, doubled, missing.
        ("B1@0 R1@1", "R1@1 B1@0", "reduce", [(0, 7)], set()),
        ("SG1@0 R1@1 U1@1", "SG1@0 U1@1 R1@1", "reduce", [(1, 8)], set()),
        ("SG1@0 R1@1", "SG1@0 R1@1 R1@1", "reduce", [(1, 9)], set()),
        ("SG1@0 R1@1", "SG1@0", "reduce", [(1, 8)], set()),
        # Waiting for a send that comes later; for one that is nowhere.
        ("SA0@0 F1@0 SA1@0 RG0@0 B0@0", "SA0@0 RG0@0 B0@0 F1@0 SA1@0", "deadlock",
         [(0, 2), (1, 2)], set()),
        ("B0@0 SG0@0", "B0@0", "deadlock", [(0, 4)], {"transfer", "edge"}),
    ],
)  # fmt: skip
def test_transfers_and_reductions(
    old: str, new: str, rule: str, where: list[tuple[int, int]], others: set[str]
) -> None:
    assert parse_grid(LOWERED, GPIPE) == lower(generate("gpipe", 2, 2, 1), reduce=True)
    assert check(parse_grid(LOWERED, GPIPE)) == []
    assert old in LOWERED
    violations = check(parse_grid(LOWERED.replace(old, new, 1), GPIPE))
    assert places(violations, rule) == where
    assert {found.rule for found in violations} == {rule} | others


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_stages": 0, "num_versions": (), "max_in_flight": ()}, "num_stages is 0"),
        ({"num_microbatches": -1}, "num_microbatches is -1; it must be at least 1"),
        ({"num_batches": 0}, "num_batches is 0"),
        ({"num_gradient_buffers": 0}, "num_gradient_buffers is 0"),
        ({"microbatches_per_update": 0}, "microbatches_per_update is 0"),
        ({"microbatches_per_update": 3}, "microbatches_per_update is 3; it must divide"),
        ({"num_versions": (2,)}, "num_versions has 1 values for 2 stages"),
        ({"num_versions": (1, 0)}, "num_versions of stage 1 is 0; it must be at least 1"),
        ({"max_in_flight": (2, 1, 1)}, "max_in_flight has 3 values for 2 stages"),
        ({"options": (("update_lag", 1),)}, "'1f1b' does not know the option 'update_lag'"),
        ({"name": "2bw-fresh", "options": (("update_lag", -1),)}, "update_lag is -1"),
    ],
)
def test_a_senseless_declaration(changes: dict[str, Any], message: str) -> None:
    violations = check(replace(generate("1f1b", 2, 2, 1), **changes))
    assert {found.rule for found in violations} == {"declaration"}
    assert any(message in found.message for found in violations)


def test_a_batch_number_that_is_not_the_microbatchs() -> None:
    schedule = generate("1f1b", 1, 1, 2)
    ops = [replace(op, batch=0) if op.microbatch == 1 else op for op in schedule.programs[0]]
    violations = check(replace(schedule, programs=(tuple(ops),)))
    assert {found.rule for found in violations} == {"numbering"}
    assert [ops[found.index or 0].kind for found in violations] == [
        OpKind.FORWARD,
        OpKind.BACKWARD,
        OpKind.UPDATE,
    ]


def test_an_unknown_name_has_no_version_rule() -> None:
    grid = "stage 0 | F0@0 B0@0 U0@1 F1@1 B1@1 U1@2"
    declared = declare("2bw", 1, 1, 2)
    assert check(parse_grid(grid, declared))
    assert check(parse_grid(grid, replace(declared, name="of my own"))) == []


def test_missing_ops_are_counted_not_listed() -> None:
    schedule = replace(generate("2bw", 1, 2, 2), num_batches=10**12)
    messages = [found.message for found in check(schedule)]
    assert messages == [
        "F4 of stage 0 is missing, and 1999999999995 more like it",
        "B4 of stage 0 is missing, and 1999999999995 more like it",
        "U5@3 of stage 0 is missing, and 999999999997 more like it",
    ]


def test_violations_are_shown_on_the_grid() -> None:
    schedule = parse_grid(
        """stage 0 | F0@0 B0@0 F1@0 B1@0 U1@1
           stage 1 | F0@0 F1@0 B0@0 B1@0 U1@1""",
        FLUSH,
    )
    assert format_violations(schedule, check(schedule)).splitlines() == [
        "stage 0 | F0@0  >B0@0<  F1@0  B1@0 U1@1",
        "stage 1 |  .    F0@0     .    >F1@0<     B0@0  B1@0 U1@1",
        "",
        "rank 0, op 1, B0@0 of stage 0: deadlock: "
        "it needs B0 of stage 1, but rank 1 waits at F1@0 for ever",
        "rank 1, op 1, F1@0 of stage 1: in-flight: 2 microbatches in flight; declared are 1",
        "rank 1, op 1, F1@0 of stage 1: deadlock: "
        "it needs F1 of stage 0, but rank 0 waits at B0@0 for ever",
    ]
