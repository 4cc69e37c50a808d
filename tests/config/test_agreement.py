"""Settings that are each right on their own, and do not go together."""

from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import get_args

import pytest

from tests.config.files import problem_of, write
from twobw.config import load_config
from twobw.config import surroundings as surroundings_module
from twobw.runtime.precision import Precision
from twobw.runtime.stage import Recompute


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"parallel": {"dp": 3}},
            "global_batch_size = 8: must be at least parallel.num_microbatches * parallel.dp = "
            "4 * 3 = 12",
        ),
        (
            {"parallel": {"num_microbatches": 9}},
            "must be at least parallel.num_microbatches = 9, a sample for each",
        ),
        (
            {"parallel": {"dp": 2}, "training": {"evaluation_batch_size": 1}},
            "a validation batch has 1 samples; it must have at least parallel.dp = 2",
        ),
        (
            {"parallel": {"dp": 2}, "training": {"evaluation_microbatches": 5}},
            "training.evaluation_microbatches * parallel.dp = 5 * 2 = 10",
        ),
        (
            {"training": {"evaluation_microbatches": 3, "evaluation_batch_size": 2}},
            "evaluation_batch_size = 2: a validation batch has 2 samples; it must have at least "
            "training.evaluation_microbatches = 3",
        ),
        (
            {"training": {"evaluate_every": 2, "evaluation_batches": 0}},
            "evaluate_every = 2: needs training.evaluation_batches",
        ),
        (
            {"training": {"precision": "fp16"}, "parallel": {"schedule": "weight-stashing"}},
            'precision = "fp16": does not go with parallel.schedule = "weight-stashing"',
        ),
        (
            {"parallel": {"schedule": "2bw", "update_lag": 1}},
            "parallel.update_lag = 1: schedule '2bw' does not know the option 'update_lag'",
        ),
        (
            {"parallel": {"schedule": "paci", "lookahead": 0.5}},
            "parallel.lookahead = 0.5: lookahead does not go with schedule = 'paci'",
        ),
        (
            {"training": {"recompute": "layer"}, "parallel": {"schedule": "paci"}},
            "training.recompute = \"layer\": recompute does not go with schedule = 'paci'",
        ),
        (
            {"parallel": {"update_lag": "measure"}},
            'parallel.update_lag = "measure": must be a whole number of at least 0, or "measured"',
        ),
        (
            {"parallel": {"schedule": "2bw-fresh", "update_lag": -1}},
            'parallel.update_lag = -1: must be a whole number of at least 0, or "measured"',
        ),
        (
            {"optimizer": {"decay": "wsd", "warmup_batches": 3, "decay_fraction": 0.6}},
            "warmup_batches = 3: too long for training.num_batches = 5, since the rate falls over "
            "the last 3",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(
    tmp_path: Path, sections: dict[str, dict[str, object]], said: str
) -> None:
    assert said in problem_of(write(tmp_path, **sections))


@pytest.mark.parametrize(
    "sections",
    [
        {"parallel": {"dp": 2}},  # 8 samples for 4 microbatches of 2 replicas
        {"parallel": {"dp": 2, "num_microbatches": 3}},  # 6 would do; parts are 4 and 4
        {"parallel": {"shard_optimizer": True}},  # with one replica it changes nothing
        {"parallel": {"check_replicas_every": 3}},
        {"parallel": {"num_microbatches": 8}, "training": {"evaluation_batch_size": 3}},
        {"training": {"precision": "bf16"}, "parallel": {"schedule": "weight-stashing"}},
        {"optimizer": {"decay": "wsd", "warmup_batches": 2, "decay_fraction": 0.6}},
        {"optimizer": {"decay": "linear", "warmup_batches": 5}},
    ],
)
def test_what_goes_together_is_accepted(
    tmp_path: Path, sections: dict[str, dict[str, object]]
) -> None:
    assert load_config(write(tmp_path, **sections))


def test_choices_are_those_of_the_runtime(tmp_path: Path) -> None:
    path = write(tmp_path)
    for setting, allowed in [("precision", Precision), ("recompute", Recompute)]:
        for choice in get_args(allowed):
            config = load_config(path, {f"training.{setting}": choice})
            assert getattr(config.training, setting) == choice
        problem = problem_of(path, {f"training.{setting}": "other"})
        assert f"must be one of {', '.join(get_args(allowed))}" in problem


def test_ranks_are_stages_times_replicas(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, parallel={"pp": 3, "dp": 2})).num_ranks == 6


def test_a_validation_batch_is_as_large_as_one_of_training_unless_said(tmp_path: Path) -> None:
    path = write(tmp_path)
    assert load_config(path).training.evaluation_size == 8
    assert load_config(path, {"training.evaluation_batch_size": "3"}).training.evaluation_size == 3


@pytest.mark.parametrize("is_installed", [False, True])
def test_tensorboard_must_be_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_installed: bool
) -> None:
    def find_spec(name: str) -> ModuleSpec | None:
        return ModuleSpec(name, None) if is_installed else None

    monkeypatch.setattr(surroundings_module, "find_spec", find_spec)
    path = write(tmp_path, run={"tensorboard": True})
    if is_installed:
        assert load_config(path).run.tensorboard
    else:
        assert "pip install tensorboard, or" in problem_of(path)
    assert load_config(path, {"run.tensorboard": "false"})
