"""Rules about the ops of one stage, one function a rule."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field

from twobw.core.checker.violation import Violation
from twobw.core.generators import SCHEDULES, stage_rule
from twobw.core.occupancy import held_gradients, in_flight, live_versions
from twobw.core.ops import Op, OpKind
from twobw.core.schedule import Schedule

_COMPUTE = (OpKind.FORWARD, OpKind.BACKWARD)


@dataclass(frozen=True, slots=True)
class StageOps:
    """The ops of one stage, with their index in the program of the rank that owns it, and whether
    the schedule reduces gradients."""

    schedule: Schedule
    rank: int
    stage: int
    is_reduced: bool
    ops: list[tuple[int, Op]] = field(default_factory=list)

    @property
    def num_microbatches(self) -> int:
        """Through the run."""
        return self.schedule.num_batches * self.schedule.num_microbatches

    @property
    def num_updates(self) -> int:
        """Through the run."""
        return self.num_microbatches // self.schedule.microbatches_per_update

    @property
    def num_versions(self) -> int:
        """Slots of this stage."""
        return self.schedule.num_versions[self.stage]

    def of(self, *kinds: OpKind) -> Iterator[tuple[int, Op]]:
        """The ops of some kinds."""
        return ((index, op) for index, op in self.ops if op.kind in kinds)

    def taken_by(self, version: int) -> range:
        """The microbatches whose gradients the update that makes ``version`` takes."""
        per_update = self.schedule.microbatches_per_update
        return range(max(version - 1, 0) * per_update, version * per_update)

    def first_missing(self, backwards: Container[int], version: int) -> int | None:
        """The first microbatch that ``version`` takes a gradient from and that is not there."""
        return next((i for i in self.taken_by(version) if i not in backwards), None)

    def backward_version(self, forward: Op) -> int:
        """The version that the backward of this forward must run on."""
        if self.schedule.backward_on_newest:
            return forward.microbatch // self.schedule.microbatches_per_update
        return forward.version

    def fault(self, rule: str, index: int, op: Op, message: str) -> Violation:
        """The violation of an op."""
        return Violation(self.rank, index, op, rule, message)

    def missing(self, rule: str, what: str, more: int) -> Violation:
        """The violation of an op that is nowhere, and of ``more`` others like it."""
        others = f", and {more} more like it" if more else ""
        message = f"{what} of stage {self.stage} is missing{others}"
        return Violation(self.rank, None, None, rule, message)


def stage_violations(schedule: Schedule) -> Iterator[Violation]:
    """All violations of the rules in this file."""
    for stage in _stages(schedule):
        for rule in _RULES:
            yield from rule(stage)


def _stages(schedule: Schedule) -> list[StageOps]:
    """Each stage's ops on the first rank that has any."""
    is_reduced = any(op.kind is OpKind.REDUCE for program in schedule.programs for op in program)
    stages: dict[int, StageOps] = {}
    for rank, program in enumerate(schedule.programs):
        for index, op in enumerate(program):
            if 0 <= op.stage < schedule.num_stages:
                stage = stages.setdefault(op.stage, StageOps(schedule, rank, op.stage, is_reduced))
                if stage.rank == rank:
                    stage.ops.append((index, op))
    return list(stages.values())


def _numbering(stage: StageOps) -> Iterator[Violation]:
    for index, op in stage.ops:
        batch = op.microbatch // stage.schedule.num_microbatches
        if not 0 <= op.microbatch < stage.num_microbatches:
            message = f"microbatches are 0..{stage.num_microbatches - 1}"
        elif op.batch != batch:
            message = f"microbatch {op.microbatch} is of batch {batch}, not {op.batch}"
        elif op.kind not in (OpKind.REDUCE, OpKind.UPDATE):
            continue
        elif not 1 <= op.version <= stage.num_updates:
            message = f"versions made are 1..{stage.num_updates}"
        elif op.microbatch != stage.taken_by(op.version)[-1]:
            last = stage.taken_by(op.version)[-1]
            message = f"version {op.version} takes the gradients up to microbatch {last}"
        else:
            continue
        yield stage.fault("numbering", index, op, message)


def _once(stage: StageOps) -> Iterator[Violation]:
    for kind in _COMPUTE:
        seen: dict[int, Op] = {}
        for index, op in stage.of(kind):
            if op.microbatch in seen:
                yield stage.fault("once", index, op, "it stands here a second time")
            seen[op.microbatch] = op
        inside = sum(0 <= microbatch < stage.num_microbatches for microbatch in seen)
        absent = stage.num_microbatches - inside
        if absent:
            first = next(microbatch for microbatch in range(inside + 1) if microbatch not in seen)
            yield stage.missing("once", f"{kind.value}{first}", absent - 1)


def _order(stage: StageOps) -> Iterator[Violation]:
    for kind in _COMPUTE:
        highest = -1
        for index, op in stage.of(kind):
            if op.microbatch < highest:
                message = f"it comes after {kind.value}{highest}; microbatches ascend"
                yield stage.fault("order", index, op, message)
            highest = max(highest, op.microbatch)


def _forward_first(stage: StageOps) -> Iterator[Violation]:
    forwards: set[int] = set()
    for index, op in stage.of(*_COMPUTE):
        if op.kind is OpKind.FORWARD:
            forwards.add(op.microbatch)
        elif op.microbatch not in forwards:
            yield stage.fault("forward-first", index, op, "its forward has not run")


def _same_version(stage: StageOps) -> Iterator[Violation]:
    forwards = {op.microbatch: op for _, op in stage.of(OpKind.FORWARD)}
    for index, op in stage.of(OpKind.BACKWARD):
        forward = forwards.get(op.microbatch)
        if forward is None or stage.backward_version(forward) == op.version:
            continue
        message = f"its forward runs on version {forward.version}"
        if stage.schedule.backward_on_newest:
            message = f"the newest before its update is version {stage.backward_version(forward)}"
        yield stage.fault("same-version", index, op, message)


def _version_rule(stage: StageOps) -> Iterator[Violation]:
    schedule = stage.schedule
    if schedule.name not in SCHEDULES:
        return
    sizes = schedule.num_stages, schedule.num_microbatches
    rule = stage_rule(schedule.name, stage.stage, *sizes, **dict(schedule.options))
    for index, op in stage.of(*_COMPUTE):
        backward_version = rule.backward_version(op.microbatch)
        is_forward = op.kind is OpKind.FORWARD
        version = rule.version(op.microbatch) if is_forward else backward_version
        # On the newest version only, a forward after a drain finds that of its backward; which of
        # the two is there, the rule "buffered" asks.
        is_newer = is_forward and rule.backward_on_newest and op.version == backward_version
        if op.version != version and not is_newer:
            message = f"under {schedule.name} microbatch {op.microbatch} runs on version {version}"
            yield stage.fault("version-rule", index, op, message)


def _buffered(stage: StageOps) -> Iterator[Violation]:
    newest = 0
    for index, op in stage.of(*_COMPUTE, OpKind.UPDATE):
        if op.kind is OpKind.UPDATE:
            newest = max(newest, op.version)
        elif op.version > newest:
            message = f"version {op.version} is not made yet; the newest is {newest}"
            yield stage.fault("buffered", index, op, message)
        elif op.version <= newest - stage.num_versions or op.version < 0:
            oldest = max(newest - stage.num_versions + 1, 0)
            message = f"version {op.version} is gone; held are {oldest}..{newest}"
            yield stage.fault("buffered", index, op, message)


def _updates(stage: StageOps) -> Iterator[Violation]:
    newest, backwards = 0, set[int]()
    for index, op in stage.of(OpKind.BACKWARD, OpKind.UPDATE):
        if op.kind is OpKind.BACKWARD:
            backwards.add(op.microbatch)
            continue
        if op.version != newest + 1:
            message = f"it makes version {op.version}; the next to make is {newest + 1}"
            yield stage.fault("updates", index, op, message)
        newest = max(newest, op.version)
        early = stage.first_missing(backwards, op.version)
        if early is not None:
            message = f"B{early}, whose gradient it takes, has not run"
            yield stage.fault("updates", index, op, message)
    absent = stage.num_updates - newest
    if absent > 0:
        last = stage.taken_by(newest + 1)[-1]
        yield stage.missing("updates", f"U{last}@{newest + 1}", absent - 1)


def _slot(stage: StageOps) -> Iterator[Violation]:
    in_use: dict[int, int] = {}
    for index, op in stage.of(*_COMPUTE, OpKind.UPDATE):
        if op.kind is OpKind.FORWARD:
            in_use[op.microbatch] = stage.backward_version(op)
        elif op.kind is OpKind.BACKWARD:
            in_use.pop(op.microbatch, None)
        else:
            slot = op.version % stage.num_versions
            for microbatch, version in in_use.items():
                if version < op.version and version % stage.num_versions == slot:
                    message = f"it writes slot {slot}, of version {version}, which microbatch "
                    yield stage.fault("slot", index, op, f"{message}{microbatch} still needs")
                    break


def _limits(stage: StageOps) -> Iterator[Violation]:
    schedule, ops = stage.schedule, [op for _, op in stage.ops]
    gradients = held_gradients(ops, schedule.microbatches_per_update)
    for rule, counts, limit, what in (
        (
            "in-flight",
            in_flight(ops),
            schedule.max_in_flight[stage.stage],
            "microbatches in flight",
        ),
        ("live-versions", live_versions(ops), stage.num_versions, "versions are needed"),
        ("gradient-buffers", gradients, schedule.num_gradient_buffers, "updates hold gradients"),
    ):
        yield from _above(stage, rule, counts, limit, what)


def _above(
    stage: StageOps, rule: str, counts: Iterable[int], limit: int, what: str
) -> Iterator[Violation]:
    """Where a count rises above its limit."""
    before = 0
    for (index, op), count in zip(stage.ops, counts, strict=True):
        if count > max(before, limit):
            yield stage.fault(rule, index, op, f"{count} {what}; declared are {limit}")
        before = count


def _reduce(stage: StageOps) -> Iterator[Violation]:
    reduced, backwards = set[int](), set[int]()
    for index, op in stage.of(OpKind.BACKWARD, OpKind.REDUCE, OpKind.UPDATE):
        if op.kind is OpKind.BACKWARD:
            backwards.add(op.microbatch)
        elif op.kind is OpKind.UPDATE:
            if stage.is_reduced and op.version not in reduced:
                yield stage.fault("reduce", index, op, "its gradients are not reduced before it")
        elif op.version in reduced:
            yield stage.fault("reduce", index, op, "it stands here a second time")
        else:
            reduced.add(op.version)
            early = stage.first_missing(backwards, op.version)
            if early is not None:
                yield stage.fault("reduce", index, op, f"B{early}, which it reduces, has not run")


_RULES: tuple[Callable[[StageOps], Iterator[Violation]], ...] = (
    _numbering,
    _once,
    _order,
    _forward_first,
    _same_version,
    _version_rule,
    _buffered,
    _updates,
    _slot,
    _limits,
    _reduce,
)
