"""The BERT: its sizes, what it sees, and what its losses count."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from twobw.models.bert import NOT_MASKED, class_loss, masked_loss
from twobw.models.sizes import BERT_SIZES, BertConfig, bert_config
from twobw.models.transformer import rotated
from twobw.models.whole import (
    flops_per_token,
    model_layers,
    model_loss,
    num_parameters,
    tied_names,
    whole_model,
)

TINY = bert_config("bert-tiny", dropout=0.0)
CLASSES = bert_config("bert-tiny", dropout=0.0, num_classes=5)


def tokens(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, TINY.vocab_size, shape, generator=generator)


@pytest.mark.parametrize(("name", "millions"), [("bert-base", 110), ("bert-large", 335)])
def test_the_papers_sizes_have_its_shapes_and_parameters(name: str, millions: int) -> None:
    config = BERT_SIZES[name]
    assert num_parameters(config) == pytest.approx(millions * 1e6, rel=0.01)
    assert (config.sequence_length, config.vocab_size, config.tied) == (512, 30522, True)
    shapes = {"bert-base": (12, 768, 12), "bert-large": (24, 1024, 16)}
    assert (config.num_layers, config.width, config.num_heads) == shapes[name]


@pytest.mark.parametrize("config", [TINY, CLASSES, bert_config("bert-tiny", tied=True)])
def test_the_count_of_parameters_is_that_of_the_formula(config: BertConfig) -> None:
    width, vocab = config.width, config.vocab_size
    body = config.num_layers * (12 * width**2 + 13 * width) + (vocab + 32) * width + 2 * width
    if config.num_classes:
        head = 2 * width + 5 * (width + 1)
    else:
        decoder = vocab if config.tied else vocab * width + vocab
        head = 2 * width + (width**2 + width) + 2 * width + decoder
    assert num_parameters(config) == body + head


@pytest.mark.parametrize(("config", "last"), [(TINY, (3, 7, 257)), (CLASSES, (3, 5))])
def test_the_model_is_embedding_blocks_head(config: BertConfig, last: tuple[int, ...]) -> None:
    layers = model_layers(config)
    assert len(layers) == config.list_length == config.num_layers + 2
    hidden = tokens(3, 7)
    shapes = []
    for build in layers:
        hidden = build()(hidden)
        shapes.append(tuple(hidden.shape))
    assert shapes == [*[(3, 7, config.width)] * (config.num_layers + 1), last]


def test_the_product_of_rotated_vectors_is_of_their_distance_alone() -> None:
    torch.manual_seed(0)
    one, other = torch.randn(2, 8)
    products = rotated(one.expand(50, 8)) @ rotated(other.expand(50, 8)).T
    for distance in (-30, -1, 0, 1, 30):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    torch.testing.assert_close(products[0, 0], one @ other)
    assert not torch.isclose(products[0, 1], products[1, 0])


def test_rotated_turns_each_pair_by_its_own_angle() -> None:
    turned = rotated(torch.tensor([[1.0, 1.0, 0.0, 0.0]] * 3))  # pairs (1, 0)
    angles = torch.arange(3)[:, None] * torch.tensor([1.0, 0.01])
    torch.testing.assert_close(turned, torch.cat([angles.cos(), angles.sin()], 1))


def test_attention_of_a_bert_knows_distances() -> None:
    torch.manual_seed(0)
    _, block, *_ = whole_model(TINY)
    hidden = torch.randn(1, 6, TINY.width)
    order = torch.tensor([1, 0, 2, 3, 4, 5])
    last = block(hidden)[0, -1]
    assert not torch.allclose(last, block(hidden[:, order])[0, -1], atol=1e-6)


def test_a_head_of_odd_width_is_refused() -> None:
    with pytest.raises(ValueError, match="num_heads is 32, which gives each head 32 / 32 = 1 of"):
        bert_config("bert-tiny", num_heads=32)


@pytest.mark.parametrize("changed", [0, 5, 11])
def test_a_token_sees_those_before_and_after_it(changed: int) -> None:
    torch.manual_seed(0)
    model = whole_model(TINY)
    before = tokens(2, 12)
    after = before.clone()
    after[:, changed] = (after[:, changed] + 1) % TINY.vocab_size
    is_changed = (model(before) - model(after)).abs().amax(-1) > 1e-6
    assert is_changed.all()


def test_the_order_of_the_tokens_matters() -> None:
    torch.manual_seed(0)
    model, sample = whole_model(CLASSES), tokens(1, 8)
    assert not torch.allclose(model(sample), model(sample.flip(1)), atol=1e-6)


def test_samples_of_a_batch_do_not_see_each_other() -> None:
    torch.manual_seed(0)
    batch = tokens(3, 8)
    for config in (TINY, CLASSES):
        model = whole_model(config)
        torch.testing.assert_close(model(batch)[1:2], model(batch[1:2]))


def test_a_new_model_knows_nothing() -> None:
    torch.manual_seed(0)
    guess = masked_loss(whole_model(TINY)(tokens(4, 32)), tokens(4, 32, seed=1))
    assert (guess[0] / guess[1]).item() == pytest.approx(math.log(257), abs=0.1)
    loss = class_loss(whole_model(CLASSES)(tokens(4, 32)), torch.tensor([0, 1, 2, 3]))
    assert loss.item() == pytest.approx(math.log(5), abs=0.1)


def test_the_loss_is_over_the_masked_tokens() -> None:
    logits = torch.randn(2, 3, 5)
    targets = torch.full((2, 3), NOT_MASKED)
    targets[0, 1], targets[1, 0] = 4, 2
    total, weight = masked_loss(logits, targets)
    assert weight.item() == 2
    expected = F.cross_entropy(logits[[0, 1], [1, 0]], torch.tensor([4, 2]), reduction="sum")
    torch.testing.assert_close(total, expected)


def test_a_batch_with_nothing_masked_weighs_nothing() -> None:
    total, weight = masked_loss(torch.randn(2, 3, 5), torch.full((2, 3), NOT_MASKED))
    assert (total.item(), weight.item()) == (0.0, 0)


def test_the_loss_is_that_of_the_head() -> None:
    assert model_loss(TINY) is masked_loss
    assert model_loss(CLASSES) is class_loss


def test_dropout_is_for_training_only() -> None:
    torch.manual_seed(0)
    model = whole_model(bert_config("bert-tiny", dropout=0.5))
    sample = tokens(1, 8)
    assert not torch.equal(model(sample), model(sample))
    model.eval()
    assert torch.equal(model(sample), model(sample))


@pytest.mark.parametrize("config", [TINY, CLASSES, bert_config("bert-tiny", tied=True)])
def test_every_parameter_gets_a_gradient(config: BertConfig) -> None:
    model = whole_model(config)
    model(tokens(2, 32)).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_a_head_that_tells_classes_is_never_tied() -> None:
    tied = bert_config("bert-tiny", tied=True)
    assert tied_names(tied) == {"3.logits.weight": "0.token.weight"}
    assert tied_names(bert_config("bert-tiny", tied=True, num_classes=3)) == {}


def test_the_cost_of_a_token_leaves_out_what_is_done_once_a_sample() -> None:
    width, blocks = 32, 2
    body = blocks * (12 * width**2 + 13 * width) + 2 * width
    attention = 12 * blocks * width * 32
    assert flops_per_token(CLASSES) == 6 * body + attention
    head = width**2 + 5 * width + 257 * width + 257
    assert flops_per_token(TINY) == 6 * (body + head) + attention


@pytest.mark.parametrize("number", [-1, 1])
def test_a_number_of_classes_that_cannot_be_is_refused(number: int) -> None:
    with pytest.raises(ValueError, match=f"num_classes is {number}; it must be at least 2, or 0"):
        bert_config("bert-tiny", num_classes=number)


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"'bert-bas' is not one of .*; did you mean 'bert-base'"):
        bert_config("bert-bas")
