"""The ``train`` command with real ranks."""

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.dist.commands import Ended, batches_of, is_running, started, wait_until
from twobw.cli import main
from twobw.config import read_resolved_config
from twobw.models.whole import whole_model
from twobw.training.report_page import run_content, run_report_command
from twobw.training.run_reading import load_run

ENDLESS = ("--training.num_batches", "1000000", "--training.log_every", "1000000")
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def check_run(run: Path, num_batches: int) -> None:
    """All files of a run of two stages are there and agree with each other."""
    rows = batches_of(run)
    assert [row["batch"] for row in rows] == list(range(num_batches))
    assert [row["samples"] for row in rows] == [8 * (n + 1) for n in range(num_batches)]
    for row in rows:
        assert 0 < row["loss"] < 7
        assert row["lr"] > 0
        assert row["tokens_per_second"] > 0
        assert len(row["stages"]) == 2
        for stage in row["stages"]:
            assert 0 <= stage["busy_fraction"] <= 1
            assert stage["num_versions"] == 2
            assert stage["peak_bytes"] > 10**7
    summary = json.loads((run / "summary.json").read_text())
    assert summary["num_batches"] == num_batches
    assert summary["tokens"] == 8 * 32 * num_batches
    assert summary["train_loss_end"] == rows[-1]["loss"]
    assert summary["sample"].startswith("def ")
    weights = load_file(run / "weights.safetensors")
    expected = whole_model(read_resolved_config(run / "config.toml").model.size()).state_dict()
    assert {name: w.shape for name, w in weights.items()} == {
        name: w.shape for name, w in expected.items()
    }


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    folder = tmp_path_factory.mktemp("whole")
    with started(folder, "twobw", "train", "tiny.toml", "--optimizer.decay=constant") as command:
        return folder / "runs/tiny", command.wait()


def test_a_run_leaves_all_its_files(whole_run: tuple[Path, Ended]) -> None:
    run, ended = whole_run
    assert (ended.code, ended.err) == (0, "")
    check_run(run, num_batches=12)
    config = read_resolved_config(run / "config.toml")
    assert (config.optimizer.decay, config.optimizer.lr) == ("constant", 0.01)
    assert {row["lr"] for row in batches_of(run)} == {0.01}
    assert (run / "rank0.log").read_text() == (run / "rank1.log").read_text() == ""


def test_a_run_learns_and_says_so(whole_run: tuple[Path, Ended]) -> None:
    run, ended = whole_run
    summary = json.loads((run / "summary.json").read_text())
    start, end = summary["validation_loss_start"], summary["validation_loss_end"]
    assert start == pytest.approx(5.55, abs=0.1)  # log(256) at random
    assert end < start - 1
    assert not summary["is_stopped_early"]
    assert f"validation loss {start:.4f} at the start, {end:.4f} at the end" in ended.out
    assert "stage 1: 2 layers, busy" in ended.out
    assert "2 weight versions held" in ended.out
    assert "a sample after 'def ':" in ended.out
    assert "runs/tiny/timeline.json" in ended.out
    assert "-m twobw sample runs/tiny --prompt 'def ')" in ended.out
    shown = [line.split()[1] for line in ended.out.splitlines() if line.startswith("step:")]
    assert shown == ["1", "5", "10", "12"]


def test_the_timeline_has_every_op_of_both_ranks(whole_run: tuple[Path, Ended]) -> None:
    run, _ = whole_run
    events = json.loads((run / "timeline.json").read_text())["traceEvents"]
    for rank in (0, 1):
        spans = [e for e in events if e["ph"] == "X" and e["pid"] == rank and e["tid"] == 0]
        names = [e["name"].partition("@")[0] for e in sorted(spans, key=lambda e: e["ts"])]
        assert sorted(n for n in names if n[0] == "F") == sorted(f"F{n}" for n in range(48))
        assert [n for n in names if n[0] == "B"] == [f"B{n}" for n in range(48)]
        assert [n for n in names if n[0] == "U"] == [f"U{4 * n + 3}" for n in range(12)]


def test_a_report_shows_every_op_and_batch(whole_run: tuple[Path, Ended], tmp_path: Path) -> None:
    content = run_content(load_run(whole_run[0]))
    (panel,) = content["timeline"]["panels"]
    kinds = [content["timeline"]["kinds"][kind] for kind in panel["spans"]["kind"]]
    microbatches = 4 * 12  # of 12 batches
    assert (kinds.count("F"), kinds.count("B")) == (2 * microbatches, 2 * microbatches)
    assert kinds.count("U") == 2 * 12
    assert [batch for batch, _ in content["training"]["loss"]] == list(range(12))
    assert run_report_command(whole_run[0], tmp_path / "page.html").startswith("the report is in")


def test_the_weights_can_be_sampled(
    whole_run: tuple[Path, Ended], capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = whole_run
    texts = []
    for seed in ("1", "1", "2"):
        with pytest.raises(SystemExit) as ended:
            main(["sample", str(run), "--prompt", "7 + ", "--tokens", "20", "--seed", seed])
        assert ended.value.code in (0, None)
        texts.append(capsys.readouterr().out)
    assert texts[0].startswith("7 + ")
    assert texts[0] == texts[1] != texts[2]


def test_ctrl_c_saves_what_was_trained(tmp_path: Path) -> None:
    with started(tmp_path, "twobw", "train", "tiny.toml", *ENDLESS) as command:
        command.wait_for_batches(3)
        command.process.send_signal(signal.SIGINT)
        ended = command.wait()
    run = tmp_path / "runs/tiny"
    assert ended.code == 0
    *said, how_to_go_on = ended.err.splitlines()
    assert said == [
        "stopping: a batch that has begun is finished and saved; Ctrl-C again ends at once",
        "stopped as asked; the weights are in runs/tiny/weights.safetensors",
    ]
    assert re.fullmatch("go on with: .* train --resume runs/tiny", how_to_go_on)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["is_stopped_early"]
    assert summary["num_batches"] >= 3
    check_run(run, summary["num_batches"])


@LINUX
def test_a_second_ctrl_c_ends_all_at_once(tmp_path: Path) -> None:
    with started(tmp_path, "twobw", "train", "tiny.toml", *ENDLESS) as command:
        command.wait_for_batches(1)
        ranks = command.ranks()
        assert sorted(ranks) == [0, 1]
        os.kill(ranks[0], signal.SIGSTOP)  # so that the first cannot be obeyed
        command.process.send_signal(signal.SIGINT)
        wait_until(lambda: "stopping" in (tmp_path / "err.txt").read_text())
        command.process.send_signal(signal.SIGINT)
        ended = command.wait(timeout=10)
    assert ended.code == 128 + signal.SIGINT
    wait_until(lambda: not any(map(is_running, ranks.values())), timeout=5)
    assert not (tmp_path / "runs/tiny/summary.json").exists()


@LINUX
def test_a_rank_that_is_killed_takes_the_run_down(tmp_path: Path) -> None:
    with started(tmp_path, "twobw", "train", "tiny.toml", *ENDLESS) as command:
        command.wait_for_batches(1)
        ranks = command.ranks()
        os.kill(ranks[1], signal.SIGKILL)
        ended = command.wait(timeout=10)
    assert ended.code == 1
    log, last = ended.err.splitlines()
    assert log == "the log of rank 1 is runs/tiny/rank1.log"
    assert last.startswith("twobw: rank 1 (stage 1) failed: ended by SIGKILL")
    assert not any(map(is_running, ranks.values()))


@LINUX
def test_a_rank_that_is_ended_by_sigterm_is_named_and_not_its_peers(tmp_path: Path) -> None:
    settings = ["--parallel.dp", "2", "--parallel.num_microbatches", "2"]
    with started(tmp_path, "twobw", "train", "tiny.toml", *ENDLESS, *settings) as command:
        command.wait_for_batches(1)
        ranks = command.ranks()
        os.kill(ranks[2], signal.SIGTERM)
        ended = command.wait(timeout=20)
    assert ended.code == 1
    log, last = ended.err.splitlines()
    assert log == "the log of rank 2 is runs/tiny/rank2.log"
    assert last == (
        f"twobw: rank 2 (stage 1) failed: ended by SIGTERM, which process {os.getpid()} sent"
    )
    assert not any(map(is_running, ranks.values()))


# Loaded by every Python that has its folder on the path.
FAILING_LAYER = """
import os
if os.environ.get("RANK") == "1":
    from twobw.models.gpt import Head
    forward, calls = Head.forward, iter(range(30))
    def failing(self, hidden):
        if next(calls, None) is None:
            raise ValueError("this layer fails")
        return forward(self, hidden)
    Head.forward = failing
"""


def test_a_layer_that_raises_has_the_last_word(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(FAILING_LAYER)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    with started(
        tmp_path, "twobw", "train", "tiny.toml", *ENDLESS, env={"PYTHONPATH": path}
    ) as command:
        ended = command.wait()
    assert ended.code == 1
    _, last = ended.err.splitlines()
    assert last.startswith(
        "twobw: rank 1 (stage 1) failed: ValueError: this layer fails; on stage 1"
    )
    assert "FORWARD of microbatch" in last
    log = (tmp_path / "runs/tiny/rank1.log").read_text()
    assert "Traceback" in log
    assert "in failing" in log


TOO_FAST = ("--optimizer.name", "sgd", "--optimizer.lr", "1e30", "--training.evaluate_every", "2")


def test_a_run_that_diverges_says_so_and_fails(tmp_path: Path) -> None:
    with started(tmp_path, "twobw", "train", "tiny.toml", *ENDLESS, *TOO_FAST) as command:
        ended = command.wait()
    run = tmp_path / "runs/tiny"
    assert ended.code == 1
    step = next(row["batch"] + 1 for row in batches_of(run) if row["loss"] is None)
    first, last = re.split(r" \(first in .*\); ", ended.err)
    assert first == f"twobw: the loss is nan at step {step}"
    assert last == (
        "try a lower optimizer.lr (now 1e+30), more optimizer.warmup_batches (now 0), or "
        "training.max_grad_norm = 1.0 (now 0, no clipping)\n"
    )
    assert re.search(r"\(first in step \d, batch \d: .* \(layer \d\) on stage \d gave", ended.err)
    assert "weights   not saved: not finite" in ended.out.splitlines()
    assert len(batches_of(run)) <= step + 3  # read two batches later, and one more is begun
    assert not (run / "weights.safetensors").exists()
    assert not (run / "best.safetensors").exists()


def test_a_run_under_torchrun_uses_its_ranks(tmp_path: Path) -> None:
    torchrun = ["torch.distributed.run", "--nproc-per-node", "2"]
    with started(tmp_path, *torchrun, "-m", "twobw", "train", "tiny.toml") as command:
        ended = command.wait()
    assert ended.code == 0
    check_run(tmp_path / "runs/tiny", num_batches=12)
    assert ended.out.count("\nstep: 12 ") == 1


def test_one_stage_trains_in_one_rank_and_warns(tmp_path: Path) -> None:
    with started(tmp_path, "twobw", "train", "tiny.toml", "--parallel.pp", "1") as command:
        ended = command.wait()
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith("warning: 2bw with one stage")
    assert [len(row["stages"]) for row in batches_of(tmp_path / "runs/tiny")] == [1] * 12
