"""What a layer keeps for its backward, against counts by hand."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.profiler.support import config
from twobw.models.sizes import gpt_config
from twobw.models.transformer import Attention
from twobw.profiler.footprint import Footprint, LiveBytes, take_footprint
from twobw.profiler.solo import Loss, SoloLayer
from twobw.profiler.subject import filled
from twobw.runtime.messages import Layout, TensorLayout

CPU = torch.device("cpu")
FLOAT = 4


def footprint(
    module: nn.Module, *shape: int, dtype: torch.dtype = torch.float32, **settings: str
) -> Footprint:
    """That of a layer which another stage gives a tensor of this shape."""
    layout = TensorLayout(shape, dtype, True, tuple(range(len(shape))))
    layer = SoloLayer(module, 1, config(**settings), CPU)
    return take_footprint(layer, partial(filled, Layout(False, (layout,)), CPU))


def test_linear_keeps_its_input():
    found = footprint(nn.Linear(8, 32, bias=False), 4, 8)
    assert found.input_bytes == found.kept_input_bytes == 4 * 8 * FLOAT
    assert found.output_bytes == 4 * 32 * FLOAT
    assert found.stash_bytes == found.kept_output_bytes == 0


def test_linear_has_three_gradients_at_once():
    found = footprint(nn.Linear(8, 32, bias=False), 4, 8)
    assert found.forward_peak_bytes == 4 * 32 * FLOAT
    assert found.backward_peak_bytes == (4 * 32 + 4 * 8 + 32 * 8) * FLOAT


def test_layer_norm_keeps_its_input_and_two_numbers_a_row():
    found = footprint(nn.LayerNorm(16), 3, 5, 16)
    assert found.kept_input_bytes == 3 * 5 * 16 * FLOAT
    assert found.stash_bytes == 2 * 3 * 5 * FLOAT
    assert found.kept_output_bytes == 0


def test_relu_keeps_its_output_only():
    found = footprint(nn.ReLU(), 4, 8)
    assert found.kept_output_bytes == 4 * 8 * FLOAT
    assert found.stash_bytes == found.kept_input_bytes == 0


def test_a_layer_that_works_in_place_makes_nothing():
    found = footprint(nn.ReLU(inplace=True), 4, 8)
    assert found.kept_input_bytes == 4 * 8 * FLOAT  # which is the output, too
    assert found.stash_bytes == found.kept_output_bytes == found.forward_peak_bytes == 0


ATTENTION = gpt_config("gpt-tiny", width=32, num_heads=4, sequence_length=16)


def test_attention_keeps_query_key_value_result_and_a_number_a_row():
    b, t, width, heads = 2, 16, 32, 4
    found = footprint(Attention(ATTENTION, is_causal=True), b, t, width)
    assert found.kept_input_bytes == b * t * width * FLOAT
    # query, key and value are views of one tensor, which counts once
    assert found.stash_bytes == (4 * b * t * width + b * heads * t) * FLOAT


def test_attention_that_is_run_again_keeps_its_input_only():
    found = footprint(
        Attention(ATTENTION, is_causal=True), 2, 16, 32, training__recompute="attention"
    )
    assert found.kept_input_bytes == 2 * 16 * 32 * FLOAT
    assert found.stash_bytes == 0


class Shares(nn.Module):
    """Its exponential is kept three times: once by itself, twice by the product."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.exp()
        return y * y


def test_a_storage_that_is_kept_more_than_once_counts_once():
    assert footprint(Shares(), 4, 8).stash_bytes == 4 * 8 * FLOAT


class Scales(nn.Module):
    """Keeps a parameter and a buffer for its backward, beside the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.register_buffer("factor", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.factor


def test_parameters_and_buffers_do_not_count():
    # the first product is kept by nobody: its other factor is a buffer, without a gradient
    found = footprint(Scales(), 4, 8)
    assert found.kept_input_bytes == 4 * 8 * FLOAT
    assert found.stash_bytes == 0


def test_mixed_precision_keeps_half_of_it():
    whole = footprint(nn.Sequential(nn.Linear(8, 8), nn.GELU()), 4, 8)
    half = footprint(
        nn.Sequential(nn.Linear(8, 8), nn.GELU()),
        *(4, 8),
        dtype=torch.bfloat16,
        training__precision="bf16",
    )
    assert whole.stash_bytes == 4 * 8 * FLOAT
    assert half.stash_bytes == half.kept_input_bytes == 4 * 8 * 2


def test_loss_keeps_the_logarithms_of_the_softmax():
    settings = {"model__name": "gpt-tiny"}
    made = config(**settings)
    loss = Loss(made, torch.zeros(2, 32, dtype=torch.int64))
    found = footprint(loss, 2, 32, 256, **settings)
    logits = 2 * 32 * 256 * FLOAT
    assert found.input_bytes == logits
    assert found.kept_input_bytes == 0
    assert found.stash_bytes == pytest.approx(logits, abs=8)  # and the scalar that weighs it
    assert found.output_bytes == FLOAT


def test_live_bytes_sees_what_is_freed():
    with LiveBytes() as live:
        x = torch.ones(10)
        y = x.view(2, 5) + 1
        del x
        assert live.current == y.nbytes
        y.add_(1)
    assert live.peak == 2 * y.nbytes
