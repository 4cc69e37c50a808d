"""Rates by batch, and which parameter has which optimizer and which decay."""

from collections.abc import Sequence

import pytest
import torch
from torch.nn import Parameter
from torch.optim import SGD, AdamW, Muon, Optimizer

from twobw.config import OptimizerSettings
from twobw.models.sizes import GPT_SIZES
from twobw.models.whole import whole_model
from twobw.training.optimizer import lr_at, make_lr_scheduler, make_optimizer


def settings(**changes: object) -> OptimizerSettings:
    return OptimizerSettings.model_validate({"lr": 0.1, "final_lr_fraction": 0.5} | changes)


def named(**shapes: tuple[int, ...]) -> list[tuple[str, Parameter]]:
    return [(name, Parameter(torch.ones(shape))) for name, shape in shapes.items()]


def gpt_parameters(*, tied: bool = False) -> list[tuple[str, Parameter]]:
    config = GPT_SIZES["gpt-tiny"]
    with torch.device("meta"):
        model = whole_model(config if not tied else type(config)(2, 32, 2, 32, 256, tied=True))
    return list(model.named_parameters())


def groups_of(optimizers: Sequence[Optimizer]) -> dict[str, tuple[type[Optimizer], float]]:
    """Optimizer and weight decay of each parameter, by name."""
    return {
        name: (type(optimizer), group["weight_decay"])
        for optimizer in optimizers
        for group in optimizer.param_groups
        for name in group["param_names"]
    }


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        ("constant", [0.05, 0.1, 0.1, 0.1, 0.1, 0.1]),
        ("linear", [0.05, 0.1, 0.0875, 0.075, 0.0625, 0.05]),
        # 0.05 + 0.05 * (1 + cos(pi * i / 4)) / 2 for i = 0 ... 4 after the first of two warmups
        ("cosine", [0.05, 0.1, 0.0926777, 0.075, 0.0573223, 0.05]),
        ("wsd", [0.05, 0.1, 0.1, 0.1, 0.075, 0.05]),  # falls over a third of the batches
    ],
)
def test_lr_of_each_batch(decay: str, expected: list[float]) -> None:
    chosen = settings(decay=decay, warmup_batches=2, decay_fraction=1 / 3)
    assert [lr_at(batch, chosen, 6) for batch in range(6)] == pytest.approx(expected, abs=1e-7)


def test_wsd_falls_over_at_least_one_batch() -> None:
    chosen = settings(decay="wsd", decay_fraction=0.01)
    assert [lr_at(batch, chosen, 3) for batch in range(3)] == [0.1, 0.1, 0.05]


def test_wsd_may_fall_all_the_way() -> None:
    chosen = settings(decay="wsd", decay_fraction=1.0)
    assert [lr_at(batch, chosen, 3) for batch in range(3)] == pytest.approx([0.1, 0.075, 0.05])


@pytest.mark.parametrize("decay", ["linear", "cosine", "wsd"])
def test_without_warmup_the_first_batch_has_the_full_rate(decay: str) -> None:
    assert lr_at(0, settings(decay=decay), 3) == 0.1


def test_a_run_of_one_batch_has_the_full_rate() -> None:
    assert lr_at(0, settings(decay="cosine"), 1) == 0.1


def test_a_warmup_longer_than_the_run_only_rises() -> None:
    chosen = settings(decay="cosine", warmup_batches=10)
    assert [lr_at(batch, chosen, 3) for batch in range(3)] == pytest.approx([0.01, 0.02, 0.03])


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_the_scheduler_gives_each_optimizer_its_rate_at_each_batch(name: str) -> None:
    chosen = settings(name=name, decay="cosine", warmup_batches=2, matrix_lr=0.3)
    parameters = named(bias=(2,), matrix=(2, 2))
    optimizers = make_optimizer(chosen)(parameters)
    assert len(optimizers) == (2 if name == "muon" else 1)
    schedulers = [make_lr_scheduler(chosen, 6)(optimizer) for optimizer in optimizers]
    for batch in range(6):
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            full = 3 if isinstance(optimizer, Muon) else 1
            for group in optimizer.param_groups:
                expected = full * lr_at(batch, chosen, 6)
                assert group["lr"] == pytest.approx(expected, rel=1e-12)
            for _, parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            scheduler.step()


def test_optimizers_have_the_settings_and_are_not_fused() -> None:
    (adamw,) = make_optimizer(settings(betas=[0.8, 0.9]))(named(w=(2,)))
    assert isinstance(adamw, AdamW)
    group = adamw.param_groups[0]
    assert (group["betas"], group["fused"]) == ((0.8, 0.9), False)
    (sgd,) = make_optimizer(settings(name="sgd", momentum=0.7))(named(w=(2,)))
    assert isinstance(sgd, SGD)
    assert (sgd.param_groups[0]["momentum"], sgd.param_groups[0]["fused"]) == (0.7, False)
    chosen = settings(
        name="muon",
        matrix_lr=0.3,
        momentum=0.7,
        nesterov=False,
        ns_steps=3,
        weight_decay=0.2,
        adjust_lr_fn="match_rms_adamw",
    )
    (muon,) = make_optimizer(chosen)(named(w=(2, 2)))
    assert isinstance(muon, Muon)
    expected = {
        "lr": 0.3,
        "momentum": 0.7,
        "nesterov": False,
        "ns_steps": 3,
        "weight_decay": 0.2,
        "adjust_lr_fn": "match_rms_adamw",
    }
    assert {key: muon.param_groups[0][key] for key in expected} == expected


@pytest.mark.parametrize(("name", "kind"), [("adamw", AdamW), ("sgd", SGD)])
def test_norms_and_biases_have_no_weight_decay(name: str, kind: type[Optimizer]) -> None:
    parameters = gpt_parameters()
    groups = groups_of(make_optimizer(settings(name=name, weight_decay=0.2))(parameters))
    assert groups == {
        name: (kind, 0.0 if name.endswith("bias") or "norm" in name else 0.2)
        for name, _ in parameters
    }
    assert groups["0.token.weight"] == (kind, 0.2)  # embeddings have it
    assert groups["3.norm.weight"] == (kind, 0.0)


@pytest.mark.parametrize("tied", [False, True])
def test_muon_is_for_the_matrices_inside_the_blocks(tied: bool) -> None:
    parameters = gpt_parameters(tied=tied)
    groups = groups_of(make_optimizer(settings(name="muon", weight_decay=0.2))(parameters))
    assert set(groups) == {name for name, _ in parameters}
    by_muon = {name for name, (kind, _) in groups.items() if kind is Muon}
    assert by_muon == {
        f"{block}.{matrix}.weight"
        for block in (1, 2)
        for matrix in ("attention.query_key_value", "attention.out", "mlp.0", "mlp.2")
    }
    assert all(decay == 0.2 for kind, decay in groups.values() if kind is Muon)
    assert groups["0.position.weight"] == (AdamW, 0.2)
    assert groups["1.mlp.0.bias"] == (AdamW, 0.0)
    assert ("3.logits.weight" in groups) == (not tied)


def test_a_share_without_matrices_or_without_the_rest_has_one_optimizer() -> None:
    make = make_optimizer(settings(name="muon"))
    assert [type(o) for o in make(named(bias=(3,)))] == [AdamW]
    assert [type(o) for o in make(named(matrix=(3, 3)))] == [Muon]


def test_decay_shrinks_matrices_and_leaves_vectors() -> None:
    parameters = named(matrix=(2, 2), bias=(2,))
    for _, parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    (adamw,) = make_optimizer(settings(weight_decay=0.5))(parameters)
    adamw.step()
    matrix, bias = (parameter for _, parameter in parameters)
    torch.testing.assert_close(matrix.detach(), torch.full((2, 2), 1 - 0.1 * 0.5))
    assert torch.equal(bias.detach(), torch.ones(2))
