"""Whether a machine has what a run needs."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.config.files import write
from twobw.config import Config, ConfigError, load_config
from twobw.profiler.analytic import compute_profile
from twobw.profiler.device import find_device
from twobw.training import resources

PROFILER = partial(compute_profile, device=find_device("a100-80gb"))


def config_of(folder: Path, **changes: dict[str, object]) -> Config:
    return load_config(write(folder, **changes))


@pytest.mark.parametrize(
    ("device", "num_gpus", "words"),
    [
        ("auto", 0, None),
        ("auto", 2, None),
        ("cpu", 0, None),
        ("cuda", 2, None),
        ("cuda", 0, 'training.device = "cuda": this machine has no GPU'),
        ("auto", 1, "parallel.pp * parallel.dp = 2 * 1 = 2: there are 1 GPUs, and each rank needs"),
    ],
)
def test_gpus(tmp_path: Path, device: str, num_gpus: int, words: str | None) -> None:
    config = config_of(tmp_path, training={"device": device}, parallel={"pp": 2})
    problem = resources.device_problem(config, num_gpus)
    assert problem is None if words is None else problem is not None and problem.startswith(words)


def test_a_plan_that_does_not_fit_is_refused_with_both_figures(tmp_path: Path) -> None:
    config = config_of(tmp_path, parallel={"pp": 2})
    stages = resources.predicted_bytes(config, PROFILER)
    needed = sum(stages) + 2 * resources.PROCESS_BYTES
    assert len(stages) == 2
    assert min(stages) > 0
    assert resources.memory_problem(config, PROFILER, host_bytes=needed) is None
    problem = resources.memory_problem(config, PROFILER, host_bytes=needed - 1e7)
    assert problem is not None
    assert problem.startswith(
        f"not enough memory: the plan takes {needed / 1e9:.2f} GB for all 2 ranks as predicted "
    )
    assert f"and {(needed - 1e7) / 1e9:.2f} GB are available" in problem
    assert resources.memory_problem(config, PROFILER, device_bytes=max(stages)) is None
    assert resources.memory_problem(config, PROFILER, device_bytes=max(stages) - 1) is not None


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"parallel": {"pp": 4, "schedule": "gpipe"}},
        {"parallel": {"pp": 2, "dp": 2}, "training": {"precision": "bf16"}},
        {"parallel": {"pp": 3, "schedule": "weight-stashing"}},
        {"optimizer": {"name": "muon"}, "training": {"global_batch_size": 64}},
    ],
)
def test_the_rough_bound_is_above_the_prediction(
    tmp_path: Path, changes: dict[str, dict[str, object]]
) -> None:
    config = config_of(tmp_path, **changes)
    total = config.parallel.dp * sum(resources.predicted_bytes(config, PROFILER))
    assert resources.rough_bytes(config) > total + config.num_ranks * resources.PROCESS_BYTES


def test_what_surely_fits_is_not_profiled(tmp_path: Path) -> None:
    def profile(*_: object) -> None:
        raise AssertionError

    assert resources.memory_problem(config_of(tmp_path), profile, host_bytes=1e12) is None


def test_a_huge_batch_is_refused_before_any_rank_starts(tmp_path: Path) -> None:
    config = config_of(tmp_path, training={"global_batch_size": 10**7, "device": "cpu"})
    with pytest.raises(ConfigError, match="not enough memory: the plan takes"):
        resources.check_resources(config, PROFILER)


@pytest.mark.parametrize("changes", [{"num_layers": 10**8}, {"width": 10**6}])
def test_a_model_that_cannot_be_is_refused_without_building_it(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    config = config_of(tmp_path, model=changes)
    problem = resources.memory_problem(config, PROFILER, host_bytes=1e11)
    assert problem is not None
    assert problem.startswith("not enough memory: the weights alone take ")
