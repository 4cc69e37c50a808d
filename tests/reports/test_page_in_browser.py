"""The pages in a real browser, from disk."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.reports.browser import complaints, find_browser, visit
from tests.reports.pages import NUM_BATCHES, a_plan, make_run
from twobw.training.report_page import run_report_command

found = find_browser()
pytestmark = pytest.mark.skipif(
    found is None, reason="no browser: pip install kaleido==0.2.1, which has one for this system"
)
HOVER = """
    const { twobwReport: { timeline }, document, PointerEvent } = window;
    const move = (x, y) => {
      const { left, top } = timeline.canvas.getBoundingClientRect();
      const event = new PointerEvent("pointermove", { clientX: left + x, clientY: top + y });
      timeline.canvas.dispatchEvent(event);
      return document.getElementById("tip").textContent;
    };
"""


def see(page: Path, script: str) -> Any:
    """What a script finds in a page that is free of errors and requests."""
    assert found is not None
    answer = visit(found, page, script)
    assert answer["url"] == page.resolve().as_uri()
    assert complaints(answer) == []
    return answer["value"]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_run(tmp_path_factory.mktemp("runs") / "demo", a_plan())
    run_report_command(folder)
    return folder / "report.html"


def test_the_browser_tells_of_faults(tmp_path: Path) -> None:
    assert found is not None
    page = tmp_path / "bad.html"
    page.write_text("<script>console.error('bad'); nothing()</script><img src='missing.png'>")
    told = complaints(visit(found, page, "return 1"))
    assert "error: bad" in told
    assert any("nothing is not defined" in text for text in told)
    with pytest.raises(AssertionError, match="no such thing"):
        visit(found, page, "throw new Error('no such thing')")


def test_the_text_of_a_run(page: Path) -> None:
    text = see(page, "return window.document.body.innerText")
    for expected in (
        "demo: a run",
        "25.0 ms (-19.4%)",
        "8,123 tokens/s",
        f"Timeline of batches 0 to {NUM_BATCHES - 1}: predicted above measured",
        "older versions",
        "measured peak",
        "What the plan was chosen among",
    ):
        assert expected in text


def test_all_spans_are_drawn_in_their_colours(page: Path) -> None:
    seen = see(
        page,
        """
        const { timeline } = window.twobwReport;
        const few = timeline.numDrawn;
        timeline.show(0, timeline.end);
        const context = timeline.canvas.getContext("2d"), scale = window.devicePixelRatio;
        const colours = timeline.rows.map((row) => {
          const x = timeline.toX(2e6);  // in the first forward of the first rank, idle on the next
          return [...context.getImageData(x * scale, (row.top + 2) * scale, 1, 1).data];
        });
        const counts = timeline.content.panels.map(({ spans }) => spans.row.length);
        return [few, timeline.numDrawn, counts, colours];
        """,
    )
    few, drawn, counts, colours = seen
    assert drawn == sum(counts)
    assert 0 < few < drawn
    blue, track = [0x00, 0x72, 0xB2, 255], [0xEE, 0xF1, 0xF5, 255]
    assert colours == [blue, track, blue, track]


def test_pointing_at_a_span_tells_of_both_timelines(page: Path) -> None:
    text, gap, hidden = see(
        page,
        HOVER
        + """
        const [first, second] = timeline.rows;
        const text = move(timeline.toX(2e6), first.top + 5);
        const gap = move(timeline.toX(2e6), second.top + 5);
        timeline.canvas.dispatchEvent(new window.Event("pointerleave"));
        return [text, gap, document.getElementById("tip").hidden];
        """,
    )
    lines = text.splitlines()
    assert lines[0] == "F0@0: forward, microbatch 0"
    assert lines[1] == "batch 0, weight version 0; stage 0"
    assert lines[2].startswith("predicted 4 ms")
    assert lines[3].startswith("measured 5 ms")
    assert "idle: bubble" in gap
    assert "waits for F0@0 on rank 0" in gap
    assert hidden


def test_zooming_and_moving(page: Path) -> None:
    before, wheeled, moved, dragged, whole, plain = see(
        page,
        HOVER
        + """
        const { WheelEvent, KeyboardEvent } = window, { canvas } = timeline;
        const views = [timeline.view];
        const x = timeline.toX(30e6), { left } = canvas.getBoundingClientRect();
        const wheel = (ctrlKey) => canvas.dispatchEvent(
          new WheelEvent("wheel", { deltaY: -200, clientX: left + x, ctrlKey, cancelable: true }));
        wheel(true);
        views.push([...timeline.view, timeline.toNs(x)]);
        canvas.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
        views.push(timeline.view);
        for (const [kind, by] of [["pointerdown", 0], ["pointermove", 50]]) {
          canvas.dispatchEvent(new PointerEvent(kind, { clientX: left + x + by, buttons: 1 }));
        }
        views.push(timeline.view);
        [...document.querySelectorAll("button")].find((b) => b.textContent === "all").click();
        views.push([...timeline.view, timeline.end]);
        wheel(false);  // scrolls the page
        views.push(timeline.view);
        return views;
        """,
    )
    assert wheeled[1] - wheeled[0] < 0.8 * (before[1] - before[0])
    assert wheeled[2] == pytest.approx(30e6, abs=0.2e6)  # pointed at, to a pixel
    assert moved[0] > wheeled[0]
    assert moved[1] - moved[0] == pytest.approx(wheeled[1] - wheeled[0])
    assert wheeled[0] < dragged[0] < moved[0]
    assert dragged[1] - dragged[0] == pytest.approx(wheeled[1] - wheeled[0])
    assert whole[:2] == [0, whole[2]]
    assert plain == whole[:2]


def test_memory_curves_and_alternatives(page: Path) -> None:
    bars, marks, limits, points, chosen, tips = see(
        page,
        """
        const { document, PointerEvent } = window;
        const all = (selector) => [...document.querySelectorAll(selector)];
        const tip = (target) => {
          target.dispatchEvent(new PointerEvent("pointermove", { clientX: 200, clientY: 200 }));
          return document.getElementById("tip").textContent;
        };
        const curve = document.querySelector("svg[aria-label='loss over batches']");
        return [
          all(".memory").length, all(".measured").length, all(".limit").length,
          all(".alternative").length, all(".chosen").length,
          [tip(all(".memory")[0]), tip(all(".chosen")[0]), tip(curve)],
        ];
        """,
    )
    plan = a_plan()
    kinds = {kind for stage in plan.stages for kind, held in stage.memory.items() if held}
    assert bars == plan.pp * len(kinds)
    assert marks == plan.pp
    assert limits == 2
    assert 0 < points < len(plan.alternatives)
    assert chosen == 1
    assert tips[0].startswith("stage 0: weights")
    assert tips[1].startswith(plan.layout)
    assert tips[1].endswith("the plan")
    assert "training loss" in tips[2]
    assert "validation loss" in tips[2]


def test_dark_and_light(page: Path) -> None:
    dark, light = see(
        page,
        """
        const { document } = window;
        const colour = () => window.getComputedStyle(document.body).backgroundColor;
        return [0, 1].map(() => { document.getElementById("theme").click(); return colour(); });
        """,
    )
    assert (dark, light) == ("rgb(20, 24, 31)", "rgb(255, 255, 255)")


def test_names_are_text_and_nothing_else(tmp_path: Path) -> None:
    name = "<img src=x onerror=alert(1)>"
    folder = make_run(tmp_path / name, a_plan())
    plan = folder / "plan.json"
    hostile = "</script><script>window.hit = 1</script>"
    values = json.loads(plan.read_text())
    values["alternatives"][0]["layout"] = values["alternatives"][0]["schedule"] = hostile
    plan.write_text(json.dumps(values))
    run_report_command(folder, tmp_path / "page.html")
    title, images, hit = see(
        tmp_path / "page.html",
        "return [window.document.querySelector('h1').textContent,"
        " window.document.images.length, window.hit]",
    )
    assert (title, images, hit) == (f"{name}: a run", 0, None)


def test_a_run_without_a_plan_and_a_plan_without_a_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "demo")
    run_report_command(folder)
    text = see(folder / "report.html", "return window.document.body.innerText")
    assert "so nothing was predicted for it" in text
    assert ": measured\n" in text
    plan = tmp_path / "plan.json"
    plan.write_text(a_plan().to_json())
    run_report_command(plan)
    text = see(tmp_path / "plan.html", "return window.document.body.innerText")
    assert "plan: a plan" in text
    assert ": predicted\n" in text
    assert "Loss and throughput" not in text
