import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.reports.pages import NUM_BATCHES, a_measured_timeline, a_plan, make_run
from twobw.cli import main
from twobw.reports.perfetto import chrome_trace
from twobw.training.report_page import run_content, run_report_command, thinned
from twobw.training.run_folder import CONFIG, METRICS, PLAN, SUMMARY, TIMELINE
from twobw.training.run_reading import load_run


def content_of(page: Path) -> dict[str, Any]:
    found = re.search(r'<script id="content"[^>]*>(.*?)</script>', page.read_text("utf-8"))
    assert found is not None
    content: dict[str, Any] = json.loads(found[1])
    return content


def test_the_page_of_a_run_with_a_plan(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "demo", a_plan())
    text = run_report_command(folder)
    assert text == f"the report is in {folder / 'report.html'} (open it in a browser)"
    content = content_of(folder / "report.html")
    assert content["title"] == "demo: a run"
    facts = dict(content["facts"])
    assert facts["time of a batch"] == "31.0 ms"
    assert facts["predicted time of a batch"] == "25.0 ms (-19.4%)"
    assert facts["throughput"] == "8,123 tokens/s"
    assert facts["predicted throughput"] == "10,240 tokens/s"  # 2 x 128 tokens in 25 ms
    assert facts["last training loss"] == "2.7500 nats a byte"
    assert facts["last validation loss"] == "3.2500 nats a byte"
    assert [panel["name"] for panel in content["timeline"]["panels"]] == ["predicted", "measured"]
    assert [stage["measured"] for stage in content["memory"]["stages"]] == [50_000_000, 40_000_000]
    training = content["training"]
    assert training["loss"] == [[batch, 5.0 - batch / 4] for batch in range(NUM_BATCHES)]
    assert training["validation_loss"] == [[0, 5.5], [NUM_BATCHES, 3.25]]
    assert training["predicted_tokens_per_second"] == pytest.approx(256 / 0.025, rel=1e-3)
    assert content["alternatives"]["chosen"] == a_plan().layout


def test_a_run_without_a_plan_says_how_to_get_a_prediction(tmp_path: Path) -> None:
    content = run_content(load_run(make_run(tmp_path / "demo")))
    assert "--parallel auto" in content["notes"][0]
    assert [panel["name"] for panel in content["timeline"]["panels"]] == ["measured"]
    assert content["alternatives"] is None
    assert content["training"]["predicted_tokens_per_second"] is None


def test_a_run_that_was_not_laid_out_as_its_plan_is_shown_without_it(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "demo", a_plan())
    config = (folder / CONFIG).read_text()
    (folder / CONFIG).write_text(config.replace("num_microbatches = 2", "num_microbatches = 4"))
    content = run_content(load_run(folder))
    assert content["notes"][0].endswith(
        "says: num_microbatches is 4, not 2, so nothing was predicted for it."
    )
    assert [panel["name"] for panel in content["timeline"]["panels"]] == ["measured"]


def test_a_timeline_after_a_change_of_schedule_says_where_it_begins(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "demo", a_plan())
    assert not any("begin anew" in note for note in run_content(load_run(folder))["notes"])
    (folder / TIMELINE).write_text(json.dumps(chrome_trace(a_measured_timeline(4))))
    content = run_content(load_run(folder))
    assert any("timeline's batch 0 is the run's batch 6" in note for note in content["notes"])


def test_a_run_that_was_killed_shows_what_there_is(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "demo")
    (folder / SUMMARY).unlink()
    (folder / TIMELINE).unlink()
    metrics = (folder / METRICS).read_text()
    (folder / METRICS).write_text(metrics[:-20])  # in the middle of its last line
    content = run_content(load_run(folder))
    assert content["timeline"] is None
    assert len(content["training"]["loss"]) == NUM_BATCHES
    assert content["training"]["validation_loss"] == [(0, 5.5)]
    assert any("has not ended, or was killed" in note for note in content["notes"])
    (folder / METRICS).unlink()
    assert run_content(load_run(folder))["training"] is None


def test_losses_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "demo")
    lines = (folder / METRICS).read_text().splitlines()
    last = json.loads(lines[-2]) | {"loss": None}
    (folder / METRICS).write_text("\n".join([*lines[:-2], json.dumps(last)]) + "\n")
    content = run_content(load_run(folder))
    assert len(content["training"]["loss"]) == NUM_BATCHES - 1
    assert "last training loss" not in dict(content["facts"])


def test_the_page_of_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "best.json"
    plan.write_text(a_plan().to_json())
    out = tmp_path / "new" / "page.html"
    with pytest.raises(SystemExit) as ended:
        main(["report", str(plan), "--out", str(out)])
    assert not ended.value.code
    assert capsys.readouterr().out == f"the report is in {out} (open it in a browser)\n"
    content = content_of(out)
    assert content["title"] == "best: a plan"
    assert content["training"] is None
    assert [panel["name"] for panel in content["timeline"]["panels"]] == ["predicted"]
    run_report_command(plan)
    assert (tmp_path / "best.html").is_file()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (SUMMARY, "{", "summary.json: Invalid JSON"),
        (SUMMARY, "{}", "summary.json: num_batches: Field required"),
        (TIMELINE, "[]", "timeline.json is no timeline"),
        (METRICS, "7\n", r"metrics.jsonl, line 1: Input should be an object"),
        (METRICS, "{\n", "metrics.jsonl, line 1: Expecting property name"),
        (METRICS, '{"batch": 0}\n', "metrics.jsonl, line 1: loss: Field required"),
        (PLAN, "{}", "plan.json is no plan"),
        (CONFIG, "[", "config.toml is no config"),
        (CONFIG, None, "is not the folder of a run: it has no config.toml"),
    ],
)
def test_files_that_hold_something_else(
    name: str,
    text: str | None,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = make_run(tmp_path / "demo")
    if text is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["report", str(folder)])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert re.search(message, error)
    assert "Traceback" not in error
    assert not (folder / "report.html").exists()


def test_neither_a_run_nor_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path / "nothing")])
    assert ended.value.code == 2
    assert "No such file" in capsys.readouterr().err


def test_long_curves_are_thinned_to_means() -> None:
    points = thinned([(n, float(n % 2)) for n in range(2000)])
    assert len(points) == 1000
    assert points[0] == (0.5, 0.5)
    assert thinned([]) == []
    assert thinned([(0, None), (1, 2.0)]) == [(1, 2.0)]
