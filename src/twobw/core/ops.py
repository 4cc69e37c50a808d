"""Ops: what a rank does, in which order, on which weight version. Identity only, no times."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum


class OpKind(Enum):
    """The kinds of op; the value is the letter code of the text form."""

    FORWARD = "F"
    BACKWARD = "B"
    SEND_ACTIVATION = "SA"
    RECV_ACTIVATION = "RA"
    SEND_GRADIENT = "SG"
    RECV_GRADIENT = "RG"
    REDUCE = "R"
    UPDATE = "U"

    @property
    def is_compute(self) -> bool:
        """Whether the op occupies the compute lane (transfers and reductions do not)."""
        return self in (OpKind.FORWARD, OpKind.BACKWARD, OpKind.UPDATE)

    @property
    def is_receive(self) -> bool:
        """Whether the op waits for a neighbouring stage."""
        return self in (OpKind.RECV_ACTIVATION, OpKind.RECV_GRADIENT)

    @property
    def is_transfer(self) -> bool:
        """Whether the op is one end of a transfer between neighbouring stages."""
        return self.is_receive or self in (OpKind.SEND_ACTIVATION, OpKind.SEND_GRADIENT)


_TEXT = re.compile(r"(SA|RA|SG|RG|F|B|R|U)(\d+)@(\d+)")


@dataclass(frozen=True, slots=True)
class Op:
    """One op of one stage.

    Attributes:
        kind: what is done.
        stage: 0-based part of the model.
        microbatch: numbered through the run. For ``REDUCE`` and ``UPDATE``: the last microbatch
            whose gradient they take.
        batch: ``microbatch // num_microbatches``.
        version: the weights a forward or backward runs on (transfers carry that of the op they
            serve); for ``REDUCE`` and ``UPDATE`` the version that is made.
    """

    kind: OpKind
    stage: int
    microbatch: int
    batch: int
    version: int

    def __str__(self) -> str:
        """``F3@1``: forward of microbatch 3 on weight version 1. ``U3@2``: the update that takes
        the gradients up to microbatch 3 and makes version 2."""
        return f"{self.kind.value}{self.microbatch}@{self.version}"


def parse_op(text: str, *, stage: int, num_microbatches: int) -> Op:
    """Read the text form of an op; the inverse of ``str(op)``.

    Raises:
        ValueError: the text is not of the form ``F3@1``.
    """
    match = _TEXT.fullmatch(text)
    if match is None:
        kinds = ", ".join(kind.value for kind in OpKind)
        raise ValueError(
            f"op {text!r} is not of the form F3@1 (kind, microbatch, version); kinds are {kinds}"
        )
    microbatch = int(match[2])
    return Op(OpKind(match[1]), stage, microbatch, microbatch // num_microbatches, int(match[3]))
