"""Profiles for described devices, against the textbook's formulas."""

import pytest
import torch

from tests.profiler.support import config
from twobw.models.sizes import gpt_config
from twobw.models.transformer import Block
from twobw.profiler.analytic import AttentionAsOn, compute_profile, counted
from twobw.profiler.device import DEVICES, DeviceError, DeviceSpec, MatrixRate
from twobw.profiler.solo import SoloLayer
from twobw.profiler.subject import filled
from twobw.runtime.messages import Layout, TensorLayout

META = torch.device("meta")
FAST = 1e30


def device(flops: float, memory: float, **changes: float) -> DeviceSpec:
    rate = MatrixRate(flops_per_second=flops, efficiency=changes.pop("efficiency", 1.0))
    return DeviceSpec(name="x", memory_bytes_per_second=memory, matrix={"fp32": rate}, **changes)


@pytest.mark.parametrize(("fused", "attention_backwards"), [(False, 2.0), (True, 2.5)])
def test_flops_of_a_block_are_the_textbooks(fused, attention_backwards):
    b, s, h = 2, 64, 32
    size = gpt_config("gpt-tiny", width=h, num_heads=4, sequence_length=s)
    layout = Layout(False, (TensorLayout((b, s, h), torch.float32, True, (0, 1, 2)),))
    with META, AttentionAsOn(fused=fused):
        layer = SoloLayer(Block(size, is_causal=True), 1, config(), META)
        with counted() as forward:
            output = layer.forward(0, filled(layout, META))
        with counted() as backward:
            layer.backward(0, layer.output_gradients(output.layout))
    # Narayanan et al. (2021, SC21), section 4: 24bsh^2 for the matrices, 4bs^2h for attention
    matrices, attention = 24 * b * s * h**2, 4 * b * s**2 * h
    assert forward.flops == matrices + attention
    # fused attention multiplies queries and keys again instead of keeping their products
    assert backward.flops == 2 * matrices + attention_backwards * attention


def test_an_op_moves_what_it_reads_and_writes():
    x, y = (torch.ones(10, device=META) for _ in range(2))
    with counted() as work:
        x.view(2, 5)
        _ = x + y
        x.add_(y)
        torch.empty_like(x).copy_(x)
    assert work.moved_bytes == 4 * 10 * (3 + 3 + 2)


def test_time_is_that_of_the_products_where_they_take_longer():
    made = config(model__name="gpt-tiny")
    profile = compute_profile(made, [2], device(1e6, FAST, efficiency=0.5))
    costs = profile.layer(3).at(2)  # the head
    flops = 2 * 2 * 32 * 32 * 256  # a product of (b t, width) and (width, vocabulary)
    assert costs.forward_ns == costs.recompute_ns == round(flops / 0.5e6 * 1e9)
    assert costs.backward_ns == 2 * costs.forward_ns
    assert costs.forward_spread_ns == 0
    assert profile.layer(0).at(2).forward_ns == 0  # nothing is multiplied in an embedding


def test_time_is_that_of_the_memory_where_it_takes_longer():
    profile = compute_profile(config(model__name="gpt-tiny"), [1], device(FAST, 1e6))
    head = profile.layer(3)
    moved = head.at(1).forward_ns / 1e3  # bytes, at 1 MB/s
    hidden, logits = 32 * 32 * 4, 32 * 256 * 4
    norm = 2 * hidden + 2 * 32 * 4 + 2 * 32 * 4  # with scale and shift, mean and deviation
    product = hidden + 256 * 32 * 4 + logits
    assert moved == norm + product
    assert head.version_copy_ns == pytest.approx(2 * head.parameter_bytes * 1e3, rel=1e-6)


def test_few_tokens_reach_less():
    spec = device(1e12, FAST, half_efficiency_tokens=64)
    assert spec.flops_per_second("fp32", 64) == 0.5e12
    assert spec.flops_per_second("fp32", 192) == 0.75e12


def test_bytes_of_weights_follow_from_the_precision():
    wide = {"model__name": "gpt-tiny", "optimizer__name": "adamw"}
    fp32 = compute_profile(config(**wide), [1], DEVICES["a100-80gb"]).layer(1)
    bf16 = compute_profile(
        config(**wide, training__precision="bf16"), [1], DEVICES["a100-80gb"]
    ).layer(1)
    n = fp32.num_parameters
    assert n == bf16.num_parameters == 12 * 32**2 + 13 * 32
    sizes = [
        (e.parameter_bytes, e.gradient_bytes, e.main_bytes, e.version_copy_ns > 0)
        for e in (fp32, bf16)
    ]
    assert sizes == [(4 * n, 4 * n, 0, True), (2 * n, 4 * n, 4 * n, False)]
    num_tensors = 12
    assert fp32.optimizer_bytes == 8 * n + 4 * num_tensors  # with a count of steps each


def test_a_model_far_larger_than_memory():
    made = config(model__name="gpt-3.8b", training__precision="fp16")
    profile = compute_profile(made, [2], DEVICES["v100-16gb"])
    assert profile.kind == "analytic"
    assert (profile.num_layers, len(profile.entries)) == (34, 3)
    total = sum(profile.layer(index).num_parameters for index in range(34))
    assert total == pytest.approx(3.94e9, rel=1e-3)
    # Korthikanti et al. (2022), section 4: sbh (34 + 5as/h), of which 4 sbh + 3 abs^2 are
    # dropout's, and 2 sbh the block's input
    s, b, h, a = 512, 2, 3072, 32
    block = profile.layer(1).at(2)
    expected = s * b * h * 34 + 5 * a * b * s**2 - (2 * s * b * h + 3 * a * b * s**2)
    kept = block.stash_bytes + block.kept_input_bytes
    assert kept == pytest.approx(expected, rel=1e-3)


def test_a_precision_that_the_device_has_not_got_is_refused():
    made = config(model__name="gpt-tiny", training__precision="bf16")
    with pytest.raises(DeviceError, match="v100-16gb has no rate for bf16; it has fp32, fp16"):
        compute_profile(made, [1], DEVICES["v100-16gb"])
