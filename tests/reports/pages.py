"""Folders of runs made by hand, and plans, for pages."""

import json
from dataclasses import asdict, replace
from pathlib import Path

from tests.planner.support import cluster, layer, profile
from twobw.core.costs import StageCost
from twobw.core.generators import generate
from twobw.core.simulator import simulate
from twobw.core.timeline import Timeline
from twobw.planner.configuration import Training
from twobw.planner.plan import Plan
from twobw.planner.search import find_plans
from twobw.reports.perfetto import chrome_trace
from twobw.training.metrics import (
    BatchRow,
    MetricsWriter,
    StageRow,
    StageSummary,
    Summary,
    ValidationRow,
)
from twobw.training.run_folder import CONFIG, METRICS, PLAN, SUMMARY, TIMELINE, write_json

NUM_BATCHES = 10
CONFIG_TEXT = """
[model]
name = "gpt-demo"
[parallel]
pp = 2
dp = 1
schedule = "2bw"
num_microbatches = 2
[training]
precision = "fp32"
"""


def a_plan() -> Plan:
    """Of two stages and two microbatches by 2BW: a forward of a stage takes 4 ms, a backward 8, an
    update 1."""
    entry = layer(
        forward_ns=10**6,
        backward_ns=2 * 10**6,
        update_ns=250_000,
        num_parameters=10**6,
        stash_bytes=10**6,
    )
    search = find_plans(
        profile([entry], [0] * 8),
        cluster(2, memory=1e8),
        Training(2),
        schedules=["2bw"],
        top=40,
    )
    found = next(plan for plan in search.plans if plan.pp == 2 and plan.recompute == "none")
    return found.model_copy(update={"alternatives": search.plans[0].alternatives})


def a_measured_timeline(num_batches: int = NUM_BATCHES) -> Timeline:
    """Of that plan, but forwards and backwards are a quarter slower."""
    stage = StageCost(forward_ns=5_000_000, backward_ns=10_000_000, update_ns=1_000_000)
    return replace(simulate(generate("2bw", 2, 2, num_batches), stage), source="measured")


def make_run(folder: Path, plan: Plan | None = None) -> Path:
    """The folder of a run of ten batches that ended well."""
    folder.mkdir(parents=True)
    (folder / CONFIG).write_text(CONFIG_TEXT)
    stage = StageRow(busy_fraction=0.9, num_versions=2, peak_bytes=50_000_000)
    with MetricsWriter(folder / METRICS) as metrics:
        metrics.write(ValidationRow(0, 0, 5.5, 244.0))
        for batch in range(NUM_BATCHES):
            metrics.write(
                BatchRow(
                    batch=batch,
                    loss=5.0 - batch / 4,
                    grad_norm=None,
                    lr=1e-3,
                    tokens_per_second=8000.0,
                    tflops=0.1,
                    mfu=None,
                    samples=2 * batch + 2,
                    num_skipped=0,
                    stages=(stage, replace(stage, peak_bytes=40_000_000)),
                )
            )
        metrics.write(ValidationRow(NUM_BATCHES, 20, 3.25, 25.8))
    ending = Summary(
        schedule="2bw",
        num_batches=NUM_BATCHES,
        samples=20,
        tokens=2560,
        num_skipped=0,
        is_stopped_early=False,
        failure=None,
        validation_loss_start=5.5,
        validation_loss_end=3.25,
        validation_loss_best=3.25,
        best_num_batches=NUM_BATCHES,
        validation_accuracy_start=None,
        validation_accuracy_end=None,
        train_loss_end=2.75,
        loss_unit="nats a byte",
        tokens_per_second=8123.0,
        train_seconds=0.3,
        stages=(StageSummary(4, 0.9, 2, 50_000_000),) * 2,
        prompt="",
        sample="",
    )
    write_json(folder / SUMMARY, asdict(ending))
    (folder / TIMELINE).write_text(json.dumps(chrome_trace(a_measured_timeline())))
    if plan is not None:
        (folder / PLAN).write_text(plan.to_json())
    return folder
