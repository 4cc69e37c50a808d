import json
import re
from dataclasses import replace

import pytest

from tests.reports.pages import NUM_BATCHES, a_measured_timeline, a_plan
from twobw.core.ops import OpKind
from twobw.core.timeline import Timeline
from twobw.planner.plan import Alternative
from twobw.reports.page import timelines
from twobw.reports.page.html import html_page
from twobw.reports.page.plans import alternatives_section, frontier, memory_section, plan_facts
from twobw.reports.page.timelines import batch_ns, predicted_timeline, timeline_section


def test_names_in_files_end_no_script() -> None:
    hostile = "</script><script>alert(1)</script><!--&\u2028"
    page = html_page(hostile, {"title": hostile})
    assert page.count("<script") == 2  # the data and the program
    assert page.count("</script>") == 2
    assert "<!--" not in page
    content = re.search(r'<script id="content" type="application/json">(.*)</script>', page)
    assert content is not None
    assert json.loads(content[1]) == {"title": hostile}
    assert "<title>&lt;/script&gt;" in page


def test_the_page_needs_nothing_else() -> None:
    page = html_page("a run", {"title": "a run"})
    assert "default-src 'none'" in page
    assert re.findall(r"https?://[^\"'\s]+", page) == ["http://www.w3.org/2000/svg"]  # a namespace
    assert not re.search(r"<(link|img|iframe|script src)", page)


def test_figures_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        html_page("a run", {"loss": float("nan")})


def test_predicted_stands_above_measured_with_the_same_ops_from_the_same_batch_on() -> None:
    section = timeline_section(a_plan(), a_measured_timeline())
    assert section is not None
    predicted, measured = section["panels"]
    assert (predicted["name"], measured["name"]) == ("predicted", "measured")
    assert (section["first_batch"], section["num_batches"]) == (0, NUM_BATCHES)
    for panel, slot_ns in ((predicted, 12_000_000), (measured, 15_000_000)):
        spans = panel["spans"]
        assert min(spans["start_ns"]) == 0
        forwards = [n for n, kind in enumerate(spans["kind"]) if section["kinds"][kind] == "F"]
        assert len(forwards) == 2 * 2 * NUM_BATCHES
        assert {spans["duration_ns"][n] for n in forwards} == {slot_ns // 3}
        assert [(row["rank"], row["stage"]) for row in panel["rows"]] == [(0, 0), (1, 1)]
    compute = [
        {
            (kind, row, microbatch, version)
            for kind, row, microbatch, version, is_compute in zip(
                *(panel["spans"][name] for name in ("kind", "row", "microbatch", "version")),
                panel["spans"]["is_compute"],
                strict=True,
            )
            if is_compute
        }
        for panel in (predicted, measured)
    ]
    assert compute[0] == compute[1]


def test_of_a_part_of_a_run_predicted_and_measured_have_the_same_numbers() -> None:
    """Of batch 6, rank 0's oldest, the recorder might have dropped a part."""
    whole = a_measured_timeline()
    kept = Timeline(
        tuple(
            span
            for span in whole.spans
            if span.op.batch > 5 or (span.op.batch == 5 and span.rank == 1)
        ),
        "measured",
    )
    section = timeline_section(a_plan(), kept)
    assert section is not None
    assert (section["first_batch"], section["num_batches"]) == (7, 3)
    for panel in section["panels"]:
        spans = panel["spans"]
        forwards = [n for n, kind in enumerate(spans["kind"]) if section["kinds"][kind] == "F"]
        first = min(forwards, key=lambda n: spans["start_ns"][n])
        numbers = [spans[name][first] for name in ("batch", "microbatch", "version", "start_ns")]
        assert numbers == [7, 14, 6, 0]
        assert max(spans["batch"]) == 9


def test_long_timelines_are_cut_to_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = a_measured_timeline(40)
    monkeypatch.setattr(timelines, "MOST_SPANS", len(timeline.spans) // 4)
    section = timeline_section(None, timeline)
    assert section is not None
    assert (section["first_batch"], section["num_batches"]) == (30, 10)


def test_idle_time_and_work_fill_the_time_shown() -> None:
    section = timeline_section(a_plan(), None)
    assert section is not None
    (panel,) = section["panels"]
    spans = panel["spans"]
    end = max(map(sum, zip(spans["start_ns"], spans["duration_ns"], strict=True)))
    for number, row in enumerate(panel["rows"]):
        busy = sum(
            duration
            for duration, at, is_compute in zip(
                spans["duration_ns"], spans["row"], spans["is_compute"], strict=True
            )
            if is_compute and at == number
        )
        assert busy / end + sum(row["idle"]) == pytest.approx(1)


def test_a_prediction_is_the_plan_played() -> None:
    plan = a_plan()
    timeline = predicted_timeline(plan, first_batch=0, num_batches=6)
    assert batch_ns(timeline) == pytest.approx(plan.batch_ns, rel=1e-3)
    later = predicted_timeline(plan, first_batch=100, num_batches=6)
    assert max(span.op.batch for span in later.spans) == 105
    assert {span.op.kind for span in later.spans} >= {OpKind.FORWARD, OpKind.SEND_ACTIVATION}


@pytest.mark.parametrize("timeline", [None, Timeline((), "measured")])
def test_nothing_to_draw(timeline: Timeline | None) -> None:
    assert timeline_section(None, timeline) is None


def test_time_of_a_batch() -> None:
    assert batch_ns(a_measured_timeline()) == 31_000_000
    assert batch_ns(Timeline((), "measured")) is None


def test_memory_by_kind() -> None:
    plan = a_plan()
    section = memory_section(plan, [50_000_000, 40_000_000])
    assert section is not None
    assert section["limit_bytes"] == 100_000_000
    assert [sum(stage["predicted"]) for stage in section["stages"]] == [
        stage.memory_bytes for stage in plan.stages
    ]
    assert [stage["measured"] for stage in section["stages"]] == [50_000_000, 40_000_000]
    assert "older_versions" in section["kinds"]
    assert "main_weights" not in section["kinds"]  # no stage has any in fp32


def test_memory_without_a_plan_or_a_measurement() -> None:
    measured = memory_section(None, [7])
    assert measured == {
        "limit_bytes": None,
        "kinds": [],
        "stages": [{"predicted": None, "measured": 7}],
    }
    predicted = memory_section(a_plan(), None)
    assert predicted is not None
    assert [stage["measured"] for stage in predicted["stages"]] == [None, None]
    assert memory_section(None, None) is None


def test_the_frontier() -> None:
    def at(peak_bytes: int, speed: float) -> Alternative:
        return Alternative(
            layout="", schedule="", samples_per_second=speed, peak_bytes=peak_bytes,
            is_simulated=False,
        )  # fmt: skip

    points = [at(30, 5), at(10, 1), at(20, 3), at(25, 2), at(10, 2), at(40, 5)]
    assert frontier(points) == [4, 2, 0]


def test_what_a_plan_was_chosen_among() -> None:
    plan = a_plan()
    section = alternatives_section(plan)
    assert section is not None
    assert section["chosen"] in section["layout"]
    assert len(section["layout"]) == len(plan.alternatives)
    assert alternatives_section(plan.model_copy(update={"alternatives": ()})) is None


def test_facts_of_a_plan() -> None:
    facts = dict(plan_facts(a_plan()))
    assert facts["layout"] == "pp=2 dp=1 2bw b=1 m=2"
    assert facts["layers of each stage"] == "4 4"
    assert facts["predicted time of a batch"] == "25.0 ms"


def test_replicas_have_a_row_each() -> None:
    spans = a_measured_timeline().spans
    both = tuple(replace(s, rank=2 * s.rank + replica) for s in spans for replica in (0, 1))
    section = timeline_section(a_plan(), Timeline(both, "measured"))
    assert section is not None
    predicted, measured = section["panels"]
    assert [(row["rank"], row["stage"]) for row in predicted["rows"]] == [(0, 0), (1, 1)]
    places = [(row["rank"], row["stage"]) for row in measured["rows"]]
    assert places == [(0, 0), (1, 0), (2, 1), (3, 1)]
