import pytest
from hypothesis import given
from hypothesis import strategies as st

from twobw.core.ops import Op, OpKind, parse_op

natural = st.integers(0, 10**6)


def test_text_form() -> None:
    assert str(Op(OpKind.FORWARD, 2, 3, 1, 1)) == "F3@1"
    assert str(Op(OpKind.RECV_GRADIENT, 0, 12, 3, 2)) == "RG12@2"
    assert parse_op("U3@2", stage=1, num_microbatches=2) == Op(OpKind.UPDATE, 1, 3, 1, 2)


@given(st.sampled_from(OpKind), natural, natural, natural, st.integers(1, 100))
def test_parse_is_the_inverse(
    kind: OpKind, stage: int, microbatch: int, version: int, num_microbatches: int
) -> None:
    op = Op(kind, stage, microbatch, microbatch // num_microbatches, version)
    assert parse_op(str(op), stage=stage, num_microbatches=num_microbatches) == op


@pytest.mark.parametrize("text", ["", "F3", "F@1", "X3@1", "f3@1", "F-3@1", "F3@1 ", "F3@1B3@1"])
def test_what_is_no_op_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not of the form F3@1"):
        parse_op(text, stage=0, num_microbatches=1)


def test_kinds() -> None:
    compute = {OpKind.FORWARD, OpKind.BACKWARD, OpKind.UPDATE}
    transfers = {kind for kind in OpKind if kind.name.startswith(("SEND", "RECV"))}
    assert {kind for kind in OpKind if kind.is_compute} == compute
    assert {kind for kind in OpKind if kind.is_transfer} == transfers
    assert {kind for kind in OpKind if kind.is_receive} == {
        kind for kind in transfers if kind.name.startswith("RECV")
    }
