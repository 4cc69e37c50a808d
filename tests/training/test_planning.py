"""A config laid out as a plan says."""

from pathlib import Path

import pytest

from tests.config.files import write
from tests.planner.support import cluster, layer, profile
from twobw.config import Config, ConfigError, load_config
from twobw.planner.configuration import Training
from twobw.planner.plan import PLANNED_SETTINGS, Plan, load_plan
from twobw.planner.search import find_plans
from twobw.profiler.profile import LinkProfile, ModelProfile
from twobw.training.planning import choose_plan, config_of_plan

BATCH = 8
SIZES = (1, 2, 4)


def tiny_profile(**more: object) -> ModelProfile:
    """Of gpt-tiny's embedding, blocks and head."""
    entries = [layer(num_parameters=100, sizes=SIZES)]
    return profile(entries, [0] * 4, loss=layer("loss", sizes=SIZES), model="gpt-tiny", **more)


def tiny_plan(global_batch_size: int = BATCH, **more: object) -> Plan:
    search = find_plans(tiny_profile(**more), cluster(2), Training(global_batch_size))
    return search.plans[0]


def plan_file(folder: Path, **changes: object) -> Path:
    path = folder / "plan.json"
    path.write_text(tiny_plan().model_copy(update=changes).to_json())
    return path


def test_a_plan_lays_out_the_run_and_is_left_in_its_folder(tmp_path: Path) -> None:
    config_file = write(tmp_path, parallel={"schedule": "gpipe", "dp": 2, "update_lag": 3})
    path = plan_file(tmp_path)
    planned = config_of_plan(config_file, {"training.seed": "5"}, path)
    plan, parallel = load_plan(path), planned.config.parallel
    assert (parallel.pp, parallel.dp, parallel.schedule) == (plan.pp, plan.dp, plan.schedule)
    assert (parallel.split, parallel.num_microbatches) == (plan.split, plan.num_microbatches)
    assert planned.config.training.seed == 5
    assert Plan.from_json(planned.files["plan.json"]) == plan


def test_a_plan_says_the_planned_settings_and_no_others() -> None:
    assert tiny_plan().settings().keys() == PLANNED_SETTINGS | {"training.global_batch_size"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "gpt-demo"}, "model.name = gpt-tiny, but the plan is for gpt-demo"),
        ({"precision": "bf16"}, "training.precision = fp32, but the plan is for bf16"),
        ({"optimizer": "sgd"}, "optimizer.name = adamw, but the plan is for sgd"),
        (
            {"global_batch_size": 16},
            "training.global_batch_size = 8, but the plan is for 16; set "
            "--training.global_batch_size 16",
        ),
    ],
)
def test_a_plan_for_something_else_is_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of_plan(write(tmp_path), {}, plan_file(tmp_path, **changes))


def test_what_the_plan_says_cannot_be_said_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--parallel.pp 4: the plan says it; leave it out"):
        config_of_plan(write(tmp_path), {"parallel.pp": "4"}, plan_file(tmp_path))


class TestAuto:
    @staticmethod
    def choose(folder: Path, overrides: dict[str, str], **sections: dict[str, object]):
        """With a profile that has not been measured; what was to be, too."""
        asked: list[tuple[Config, list[int]]] = []

        def measure(config: Config, sizes: list[int]) -> ModelProfile:
            asked.append((config, list(sizes)))
            return tiny_profile(link=LinkProfile(latency_ns=0, bytes_per_second=1e9))

        path = write(folder, **sections)
        config = load_config(path, overrides)
        return choose_plan(path, overrides, config, None, measure), asked

    def test_profiles_with_all_devices_at_work(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr("twobw.training.planning.num_local_devices", lambda threads: 2)
        planned, asked = self.choose(tmp_path, {})
        ((config, sizes),) = asked
        assert (config.num_ranks, sizes) == (2, [1, 2, 4, 8])
        assert planned.config.num_ranks == 2
        assert planned.files.keys() == {"plan.json", "profile.json"}
        assert "samples/s" in capsys.readouterr().out

    def test_under_a_launcher_it_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.setenv(name, "1")
        with pytest.raises(ValueError, match="run twobw profile and twobw plan first"):
            self.choose(tmp_path, {})

    def test_a_layout_of_ones_own_is_refused_before_anything_is_measured(
        self, tmp_path: Path
    ) -> None:
        with pytest.raises(ConfigError, match=r"--parallel.num_microbatches 2: the plan says it"):
            self.choose(tmp_path, {"parallel.num_microbatches": "2"})

    def test_a_wish_that_a_plan_keeps_is_taken(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("twobw.training.planning.num_local_devices", lambda threads: 2)
        planned, _ = self.choose(tmp_path, {"parallel.overlap_reduce": "false"})
        assert not planned.config.parallel.overlap_reduce
