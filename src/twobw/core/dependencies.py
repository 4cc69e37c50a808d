"""What each span of a timeline had to wait for, whether it was simulated or measured."""

from __future__ import annotations

from collections.abc import Iterator

from twobw.core.ops import Op, OpKind
from twobw.core.replay import data_source
from twobw.core.timeline import COMPUTE_LANE, Span, Timeline

_SENDS = {OpKind.FORWARD: OpKind.SEND_ACTIVATION, OpKind.BACKWARD: OpKind.SEND_GRADIENT}
_RECEIVES = {OpKind.FORWARD: OpKind.RECV_ACTIVATION, OpKind.BACKWARD: OpKind.RECV_GRADIENT}
_TOGETHER = 20  # reductions made together end within this part of their time
_SENT = {send: kind for kind, send in _SENDS.items()}

_Place = tuple[int, OpKind, int, int]  # replica, kind, stage, microbatch


class Dependencies:
    """The spans of a timeline by what they are.

    Ranks that have the same stage are replicas, in ascending order; what is older than the
    timeline is not waited for.

    Args:
        timeline: of any schedule.
    """

    def __init__(self, timeline: Timeline) -> None:
        owners: dict[int, set[int]] = {}
        for span in timeline.spans:
            owners.setdefault(span.op.stage, set()).add(span.rank)
        self.num_stages = max(owners, default=-1) + 1
        self._replica = {
            (stage, rank): replica
            for stage, ranks in owners.items()
            for replica, rank in enumerate(sorted(ranks))
        }
        self._spans = {self._place(span.op, span.rank): span for span in timeline.spans}
        self._before: dict[Span, Span] = {}
        for rank in timeline.ranks:
            last: dict[str, Span] = {}
            for span in timeline.spans_of(rank):
                if span.lane in last:
                    self._before[span] = last[span.lane]
                last[span.lane] = span

    def before(self, span: Span) -> Span | None:
        """The span before it on its lane."""
        return self._before.get(span)

    def source(self, span: Span) -> Span | None:
        """The forward or backward of another stage whose result a span takes."""
        event = data_source(span.op, self.num_stages)
        return None if event is None else self._find(span, *event)

    def message(self, span: Span) -> Span | None:
        """The send of what a forward or backward takes."""
        event = data_source(span.op, self.num_stages)
        return None if event is None else self._find(span, _SENDS[event[0]], *event[1:])

    def receive(self, span: Span) -> Span | None:
        """The wait for what a forward or backward takes."""
        kind = _RECEIVES.get(span.op.kind)
        return kind and self._find(span, kind, span.op.stage, span.op.microbatch)

    def reduction(self, update: Span) -> Span | None:
        """The reduction that an update takes."""
        return self._find(update, OpKind.REDUCE, update.op.stage, update.op.microbatch)

    def last_to_reduce(self, reduction: Span) -> Span:
        """Of the stages that make this reduction together, the one that came to it last; itself
        if it is made alone. Those that are made together end together."""
        apart_ns = reduction.duration_ns / _TOGETHER
        others = (
            self._find(reduction, OpKind.REDUCE, stage, reduction.op.microbatch)
            for stage in range(self.num_stages)
        )
        together = [o for o in others if o and abs(o.end_ns - reduction.end_ns) <= apart_ns]
        return max(together, key=lambda other: (other.start_ns, other is reduction))

    def all_of(self, span: Span) -> Iterator[Span]:
        """What had to end before a span could start."""
        kind = span.op.kind
        before = self.before(span)
        if before is not None and not kind.is_receive:
            yield before
        found: Span | None = None
        if kind in _SENDS:
            found = self.message(span) or self.source(span)
        elif kind is OpKind.UPDATE:
            found = self.reduction(span)
        elif kind in _SENT:
            found = self._find(span, _SENT[kind], span.op.stage, span.op.microbatch)
        elif kind is OpKind.REDUCE:
            found = self._find(span, OpKind.BACKWARD, span.op.stage, span.op.microbatch)
        if found is not None:
            yield found

    def _place(self, op: Op, rank: int) -> _Place:
        return self._replica[op.stage, rank], op.kind, op.stage, op.microbatch

    def _find(self, span: Span, kind: OpKind, stage: int, microbatch: int) -> Span | None:
        replica = self._replica[span.op.stage, span.rank]
        return self._spans.get((replica, kind, stage, microbatch))


def compute_spans(timeline: Timeline, rank: int) -> list[Span]:
    """Those of a rank's compute lane, in the order they ran."""
    return [span for span in timeline.spans_of(rank) if span.lane == COMPUTE_LANE]
