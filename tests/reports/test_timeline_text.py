import json
from pathlib import Path

import pytest

from tests.planner.support import cluster, layer, profile
from twobw.cli import main
from twobw.planner.configuration import Training
from twobw.planner.search import find_plans
from twobw.reports.timeline_text import run_simulate_command


def simulate(name: str, **more: float) -> str:
    return run_simulate_command(schedule=name, num_stages=2, num_microbatches=4, **more)


def test_a_flush() -> None:
    lines = simulate("1f1b", num_batches=10).splitlines()
    assert lines[0] == "1f1b: 2 stages, 4 microbatches a batch"
    assert lines[1].startswith("a batch takes 15.000 ms; 10 batches 150.000 ms, filling and drain")
    assert lines[3].split() == ["rank", "busy", "bubble", "waits", "most", "on"]
    assert lines[4].split() == ["0", "80.0%", "20.0%", "rank", "1"]
    assert lines[5].split() == ["1", "80.0%", "20.0%", "rank", "0"]
    assert "  bubble: more microbatches a batch, or a schedule that does not drain" in lines


def test_2bw_fills_and_drains_once() -> None:
    text = simulate("2bw", num_batches=1000)
    assert "a batch takes 12.000 ms; 1000 batches 12003.000 ms" in text
    assert "filling and draining 3.000 ms of it" in text
    assert "what would help" not in text


def test_slow_links_and_what_helps() -> None:
    slow = simulate("2bw", transfer_ms=0.3)
    assert "  link: more in flight (extra_in_flight)" in slow
    assert "a batch takes 13.200 ms" in slow
    assert "a batch takes 12.000 ms" in simulate("2bw", transfer_ms=0.3, extra_in_flight=1)


def test_a_plan(tmp_path: Path) -> None:
    model = profile([layer(forward_ns=1000, backward_ns=2000, num_parameters=10**6)], [0] * 4)
    plans = find_plans(model, cluster(2), Training(4), schedules=["2bw"], top=20).plans
    plan = next(plan for plan in plans if plan.pp == 2)
    path, trace = tmp_path / "plan.json", tmp_path / "trace.json"
    path.write_text(plan.to_json())
    text = run_simulate_command(path, trace=trace)
    assert f"{plan.samples_per_second:.2f} samples a second on 2 devices" in text
    assert f"{plan.stages[0].memory_bytes / 1e9:.2f}" in text
    assert json.loads(trace.read_text())["otherData"] == {"source": "simulated"}


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "simulate needs a plan's file, or --schedule"),
        (["--schedule", "2bw"], "--schedule needs --stages and --microbatches"),
        (["--schedule", "2bww", "--stages", "2", "--microbatches", "2"], "did you mean '2bw'"),
        (["--schedule", "2bw", "--stages", "0", "--microbatches", "2"], "--stages is 0"),
        (
            ["--schedule", "2bw", "--stages", "2", "--microbatches", "2", "--forward-ms", "-1"],
            "--forward-ms is -1.0; it must be at least 0",
        ),
        (["--schedule", "gpipe", "--stages", "2", "--microbatches", "2", "--batches", "0"], "is 0"),
    ],
)
def test_what_will_not_do_is_refused(
    tokens: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *tokens])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
