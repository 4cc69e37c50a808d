"""Profile, plan and train in one command; then what was predicted beside what was measured."""

from pathlib import Path

from tests.dist.commands import started
from twobw.planner.plan import load_plan


def test_auto_then_the_same_plan_then_compare(tmp_path: Path) -> None:
    with started(tmp_path, "twobw", "train", "tiny.toml", "--parallel", "auto") as command:
        ended = command.wait()
    assert ended.code == 0, ended
    assert "samples/s" in ended.out
    run = tmp_path / "runs/tiny"
    plan = load_plan(run / "plan.json")
    assert f"{plan.pp} stages" in ended.out or plan.pp == 1
    with started(tmp_path, "twobw", "compare", str(run)) as command:
        compared = command.wait()
    assert compared.code == 0, compared
    assert "time of a batch, ms" in compared.out
    again = (str(run / "plan.json"), "--run.name", "again")
    with started(tmp_path, "twobw", "train", "tiny.toml", "--parallel", *again) as command:
        ended = command.wait()
    assert ended.code == 0, ended
    assert load_plan(tmp_path / "runs/again/plan.json") == plan
    with started(tmp_path, "twobw", "train", "tiny.toml", "--parallel", "none.json") as command:
        ended = command.wait()
    assert (ended.code, "none.json" in ended.err, "Traceback" in ended.err) == (2, True, False)
