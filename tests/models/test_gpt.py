"""The GPT: its sizes, its weights, and that it cannot see what comes after."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from twobw.models.gpt import gpt_layers, loss_fn
from twobw.models.sizes import GPT_SIZES, GPTConfig, gpt_config
from twobw.models.whole import num_parameters, whole_model

TINY = GPT_SIZES["gpt-tiny"]


def build_from(layers: list[Callable[[], nn.Module]], first: int, end: int) -> list[nn.Module]:
    """Layers ``first .. end - 1`` alone, as a stage builds them: seeded one by one."""
    built = []
    for index in range(first, end):
        torch.manual_seed(100 + index)
        built.append(layers[index]())
    return built


def tokens(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, TINY.vocab_size, shape, generator=generator)


@pytest.mark.parametrize(
    ("name", "millions"),
    [("gpt-355m", 355), ("gpt-1.3b", 1300), ("gpt-2.2b", 2200), ("gpt-3.8b", 3800)],
)
def test_the_papers_sizes_have_the_parameters_of_their_names(name: str, millions: int) -> None:
    config = GPT_SIZES[name]
    assert num_parameters(config) == pytest.approx(millions * 1e6, rel=0.03)
    assert (config.sequence_length, config.vocab_size) == (512, 51200)


@pytest.mark.parametrize("config", [TINY, GPT_SIZES["gpt-demo"], GPT_SIZES["gpt-bench"]])
def test_the_count_of_parameters_is_that_of_the_formula(config: GPTConfig) -> None:
    width, blocks = config.width, config.num_layers
    block = 12 * width**2 + 13 * width  # 4 matrices, their biases, 2 LayerNorms
    tables = (2 * config.vocab_size + config.sequence_length) * width
    assert num_parameters(config) == blocks * block + tables + 2 * width


def test_the_model_is_embedding_blocks_head() -> None:
    layers = gpt_layers(TINY)
    assert len(layers) == TINY.list_length == TINY.num_layers + 2
    hidden: Tensor = tokens(3, 7)
    shapes = []
    for build in layers:
        hidden = build()(hidden)
        shapes.append(tuple(hidden.shape))
    assert shapes == [*[(3, 7, TINY.width)] * (TINY.num_layers + 1), (3, 7, TINY.vocab_size)]


def test_every_split_starts_from_the_same_weights() -> None:
    layers = gpt_layers(TINY)
    whole = build_from(layers, 0, 4)
    for cut in (1, 2, 3):
        split = build_from(layers, 0, cut) + build_from(layers, cut, 4)
        for one, other in zip(whole, split, strict=True):
            torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)


def test_blocks_do_not_share_weights() -> None:
    _, first, second, _ = whole_model(TINY)
    assert not torch.equal(first.mlp[0].weight, second.mlp[0].weight)


def test_the_weights_start_as_gpt2s() -> None:
    torch.manual_seed(0)
    config = gpt_config("gpt-demo", num_layers=8)
    embedding, block, *_, head = whole_model(config)
    residual = 0.02 / math.sqrt(2 * 8)
    for weight, std in [
        (embedding.token.weight, 0.02),
        (embedding.position.weight, 0.02),
        (block.attention.query_key_value.weight, 0.02),
        (block.attention.out.weight, residual),
        (block.mlp[0].weight, 0.02),
        (block.mlp[2].weight, residual),
        (head.logits.weight, 0.02),
    ]:
        assert weight.std().item() == pytest.approx(std, rel=0.05)
    assert all(not linear.bias.any() for linear in (block.attention.out, block.mlp[0]))


def test_a_new_model_knows_nothing() -> None:
    torch.manual_seed(0)
    loss = loss_fn(whole_model(TINY)(tokens(4, 32)), tokens(4, 32, seed=1))
    assert loss.item() == pytest.approx(math.log(TINY.vocab_size), abs=0.1)


@pytest.mark.parametrize("changed", [0, 1, 5, 11])
def test_a_token_changes_nothing_before_it(changed: int) -> None:
    torch.manual_seed(0)
    model = whole_model(TINY)
    before = tokens(2, 12)
    after = before.clone()
    after[:, changed] = (after[:, changed] + 1) % TINY.vocab_size
    one, other = model(before), model(after)
    torch.testing.assert_close(one[:, :changed], other[:, :changed])
    is_changed = (one[:, changed:] - other[:, changed:]).abs().amax(-1) > 1e-6
    assert is_changed.all()  # itself, and everything after it


def test_the_order_of_the_tokens_matters() -> None:
    torch.manual_seed(0)
    model = whole_model(TINY)
    sample = tokens(1, 8)
    swapped = sample[:, [1, 0, *range(2, 8)]]
    assert not torch.allclose(model(sample)[:, -1], model(swapped)[:, -1], atol=1e-6)


def test_samples_of_a_batch_do_not_see_each_other() -> None:
    torch.manual_seed(0)
    model = whole_model(TINY)
    batch = tokens(3, 8)
    torch.testing.assert_close(model(batch)[1:2], model(batch[1:2]))


def test_attention_is_softmax_of_scaled_products() -> None:
    torch.manual_seed(0)
    attention = whole_model(TINY)[1].attention
    hidden = torch.randn(2, 5, TINY.width)
    heads, per_head = TINY.num_heads, TINY.width // TINY.num_heads
    query, key, value = (
        part.view(2, 5, heads, per_head).transpose(1, 2)
        for part in attention.query_key_value(hidden).split(TINY.width, dim=-1)
    )
    scores = query @ key.transpose(-1, -2) / math.sqrt(per_head)
    scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
    mixed = (scores.softmax(-1) @ value).transpose(1, 2).reshape(2, 5, TINY.width)
    torch.testing.assert_close(attention(hidden), attention.out(mixed))


def test_the_loss_is_the_mean_over_tokens() -> None:
    logits, targets = torch.randn(2, 3, 5), torch.tensor([[0, 1, 2], [3, 4, 0]])
    each = [
        -logits[sample, position].log_softmax(0)[targets[sample, position]]
        for sample in range(2)
        for position in range(3)
    ]
    torch.testing.assert_close(loss_fn(logits, targets), torch.stack(each).mean())
    assert loss_fn(logits, targets) == F.cross_entropy(logits.view(6, 5), targets.view(6))


def test_dropout_is_for_training_only() -> None:
    torch.manual_seed(0)
    model = whole_model(gpt_config("gpt-tiny", dropout=0.5))
    sample = tokens(1, 8)
    assert not torch.equal(model(sample), model(sample))
    model.eval()
    assert torch.equal(model(sample), model(sample))


def test_logits_are_fp32_in_a_16_bit_model() -> None:
    assert whole_model(TINY).bfloat16()(tokens(1, 4)).dtype is torch.float32


def test_every_parameter_gets_a_gradient() -> None:
    model = whole_model(TINY)
    loss_fn(model(tokens(2, 32)), tokens(2, 32, seed=1)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_too_long_a_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="33 tokens a sample; sequence_length allows 32"):
        whole_model(TINY)(tokens(1, 33))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_layers": 0}, "num_layers is 0; it must be at least 1"),
        ({"width": -1}, "width is -1"),
        ({"num_heads": 3}, "num_heads is 3, which does not divide width 32"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"dropout": math.nan}, "dropout is nan"),
    ],
)
def test_a_size_that_no_gpt_can_have_is_refused(changes: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        gpt_config("gpt-tiny", **changes)


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"'gpt-1\.3' is not one of .*; did you mean 'gpt-1\.3b'"):
        gpt_config("gpt-1.3")
