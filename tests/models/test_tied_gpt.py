"""The GPT whose embedding and head share the token matrix; and what a token costs."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import twobw
from twobw.models.gpt import gpt_layers, loss_fn
from twobw.models.sizes import GPT_SIZES
from twobw.models.transformer import Attention
from twobw.models.whole import flops_per_token, model_with, num_parameters, whole_model
from twobw.runtime.layers import build_layers, find_ties
from twobw.runtime.randomness import build_layer

TINY = GPT_SIZES["gpt-tiny"]
TIED = replace(TINY, tied=True)
SEED = 3


def layers_of(config=TIED) -> list[nn.Module | Callable[[], nn.Module]]:
    return gpt_layers(config, partial(build_layer, SEED))


def momentum(named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.05, momentum=0.9)


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 256, (count, 4, 9), generator=generator)
    return [(batch[:, :-1], batch[:, 1:]) for batch in tokens]


def test_the_ends_share_a_matrix_that_the_pipeline_can_see() -> None:
    embedding, *blocks, head = layers_of()
    assert head.logits.weight is embedding.token.weight
    assert not any(isinstance(block, nn.Module) for block in blocks)  # built where they live
    (tie,) = find_ties([embedding, *blocks, head], [2, 2])
    assert tie.names == ("0.token.weight", "3.logits.weight")


def test_every_rank_builds_the_same_ends_whatever_was_drawn_before() -> None:
    torch.manual_seed(1)
    one = layers_of()
    torch.rand(5)
    other = layers_of()
    for index in (0, -1):
        torch.testing.assert_close(
            one[index].state_dict(), other[index].state_dict(), rtol=0, atol=0
        )


def test_tying_changes_the_heads_matrix_and_nothing_else() -> None:
    tied, untied = (build_layers(layers_of(config), 0, SEED) for config in (TIED, TINY))
    for index, (one, other) in enumerate(zip(tied, untied, strict=True)):
        for (name, weight), expected in zip(
            one.named_parameters(), other.parameters(), strict=True
        ):
            assert torch.equal(weight, expected) == ((index, name) != (3, "logits.weight"))


def test_the_shared_matrix_counts_once() -> None:
    assert num_parameters(TIED) == num_parameters(TINY) - 256 * 32


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.filterwarnings("ignore:2bw with")
def test_the_split_does_not_change_what_is_learned(pp: int) -> None:
    """Beside the whole model in one process, to the order of summation."""
    layers = layers_of()
    model = nn.Sequential(*build_layers(copy.deepcopy(layers), 0, SEED))
    with twobw.Pipeline(
        layers, loss_fn, momentum, "1f1b", 2, pp=pp, seed=SEED, max_grad_norm=0.5, timeout=30
    ) as pipeline:
        losses = [float(pipeline.train_step(*batch).loss) for batch in batches(3)]
        state = pipeline.full_state_dict()
    optimizer = momentum(list(model.named_parameters()))
    for loss, (inputs, targets) in zip(losses, batches(3), strict=True):
        expected = loss_fn(model(inputs), targets)
        expected.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert state is not None
    assert torch.equal(state["0.token.weight"], state["3.logits.weight"])
    torch.testing.assert_close(state, dict(model.state_dict()), rtol=1e-4, atol=1e-6)


def test_a_model_from_weights_is_tied_and_shares_their_memory() -> None:
    state = whole_model(TIED).state_dict()
    model = model_with(TIED, state)
    assert model[-1].logits.weight is model[0].token.weight
    assert model[0].token.weight.data_ptr() == state["0.token.weight"].data_ptr()


def test_attention_is_marked_for_recompute() -> None:
    marked = [m for m in whole_model(TINY).modules() if getattr(m, "is_attention", False)]
    assert [type(module) for module in marked] == [Attention] * 2


@pytest.mark.parametrize("config", [TINY, TIED])
def test_the_cost_of_a_token_is_that_of_the_formula(config) -> None:
    width, blocks = 32, 2
    vectors = blocks * 13 * width + 2 * width
    matrices = blocks * 12 * width**2 + 256 * width  # the head's, which may be the embedding's
    assert flops_per_token(config) == 6 * (matrices + vectors) + 12 * blocks * width * 32
