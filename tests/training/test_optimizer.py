import pytest
import torch

from twobw.config import OptimizerSettings
from twobw.training.optimizer import lr_at, make_lr_scheduler, make_optimizer


def settings(**changes: object) -> OptimizerSettings:
    return OptimizerSettings.model_validate({"lr": 0.1, "final_lr_fraction": 0.5} | changes)


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        ("constant", [0.05, 0.1, 0.1, 0.1, 0.1, 0.1]),
        ("linear", [0.05, 0.1, 0.0875, 0.075, 0.0625, 0.05]),
        # 0.05 + 0.05 * (1 + cos(pi * i / 4)) / 2 for i = 0 ... 4 after the first of two warmups
        ("cosine", [0.05, 0.1, 0.0926777, 0.075, 0.0573223, 0.05]),
    ],
)
def test_lr_of_each_batch(decay: str, expected: list[float]) -> None:
    chosen = settings(decay=decay, warmup_batches=2)
    assert [lr_at(batch, chosen, 6) for batch in range(6)] == pytest.approx(expected, abs=1e-7)


def test_without_warmup_the_first_batch_has_the_full_rate() -> None:
    assert lr_at(0, settings(decay="linear"), 3) == 0.1


def test_a_run_of_one_batch_has_the_full_rate() -> None:
    assert lr_at(0, settings(decay="cosine"), 1) == 0.1


def test_a_warmup_longer_than_the_run_only_rises() -> None:
    chosen = settings(decay="cosine", warmup_batches=10)
    assert [lr_at(batch, chosen, 3) for batch in range(3)] == pytest.approx([0.01, 0.02, 0.03])


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_scheduler_gives_the_optimizer_lr_at_each_batch(name: str) -> None:
    chosen = settings(name=name, decay="cosine", warmup_batches=2)
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = make_optimizer(chosen)([("weight", weight)])
    scheduler = make_lr_scheduler(chosen, 6)(optimizer)
    for batch in range(6):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(lr_at(batch, chosen, 6), rel=1e-12)
        weight.grad = torch.ones(2)
        optimizer.step()
        scheduler.step()


def test_optimizers_have_the_settings_and_are_not_fused() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    adamw = make_optimizer(settings(betas=[0.8, 0.9], weight_decay=0.2))([("w", weight)])
    assert isinstance(adamw, torch.optim.AdamW)
    group = adamw.param_groups[0]
    assert (group["betas"], group["weight_decay"], group["fused"]) == ((0.8, 0.9), 0.2, False)
    sgd = make_optimizer(settings(name="sgd", momentum=0.7))([("w", weight)])
    assert isinstance(sgd, torch.optim.SGD)
    assert (sgd.param_groups[0]["momentum"], sgd.param_groups[0]["fused"]) == (0.7, False)
