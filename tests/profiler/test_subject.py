"""Which layers are equal, and what each is given."""

import torch

from tests.profiler.support import config
from twobw.profiler.profile import TieProfile
from twobw.profiler.subject import filled, make_subject

META = torch.device("meta")


def test_equal_blocks_are_one():
    subject = make_subject(config(model__name="gpt-tiny", model__num_layers="5"), [1, 2])
    assert subject.layers == (0, 1, 1, 1, 1, 1, 2)
    assert subject.firsts == (0, 1, 6)
    assert [type(layer.module).__name__ for layer in subject.build(META)] == [
        *("Embedding", "Block", "Head", "Loss")
    ]


def test_each_layer_is_given_what_the_one_before_gives():
    subject = make_subject(config(model__name="gpt-tiny"), [1, 3])
    tokens, hidden, last, logits = (layout.tensors[0] for layout in subject.given[3])
    assert (tokens.shape, tokens.dtype) == ((3, 32), torch.int64)
    assert hidden == last
    assert (hidden.shape, hidden.requires_grad) == ((3, 32, 32), True)
    assert (logits.shape, logits.dtype) == ((3, 32, 256), torch.float32)


def test_messages_are_16_bit_in_mixed_precision():
    subject = make_subject(config(model__name="gpt-tiny", training__precision="bf16"), [1])
    _, hidden, _, logits = (layout.tensors[0].dtype for layout in subject.given[1])
    assert (hidden, logits) == (torch.bfloat16, torch.float32)


def test_what_is_tied_is_told_and_then_copied():
    subject = make_subject(config(model__name="gpt-tiny", model__tied="true"), [1])
    assert subject.ties == (TieProfile(layers=(0, 3), num_parameters=256 * 32),)
    embedding, _, head, _ = subject.build(torch.device("cpu"))
    assert embedding.module.token.weight is not head.module.logits.weight
    assert not make_subject(config(model__name="gpt-tiny"), [1]).ties


def test_classes_have_a_target_a_sample():
    made = config(model__name="bert-tiny", model__num_classes="3")
    subject = make_subject(made, [4])
    assert subject.given[4][-1].tensors[0].shape == (4, 3)
    loss = subject.build(torch.device("cpu"))[-1]
    message = loss.forward(0, filled(subject.given[4][-1], torch.device("cpu")))
    assert message.layout.tensors[0].shape == ()


def test_the_callers_random_stream_goes_on():
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    make_subject(config(model__name="gpt-tiny"), [1])
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_stage_has_equal_layers_as_often_as_its_share():
    made = make_subject(config(model__num_layers="9", parallel__pp="3"), [1])
    assert made.counts_a_stage() == [1, 3, 1]
