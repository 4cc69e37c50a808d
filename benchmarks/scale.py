"""How planner and simulator scale, beside what was asked of them.

    python benchmarks/scale.py [--repeats 3] [--json FILE]

Medians over the repeats, by the clock, of: planning GPT 3.8B on 64 V100s; planning a model of 128
layers on 10,240 devices; simulating a batch of 512 microbatches over 32 stages. Profiles are
computed beforehand. The device of the paper and its links are those of `paper.toml`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from harness import Target, report, warn_if_busy
from paper_systems import GIVEN, cluster, model_config, profile

from twobw.core.costs import LinkCost, PipelineCost, StageCost
from twobw.core.steady import steady_state
from twobw.planner.configuration import Training
from twobw.planner.search import find_plans
from twobw.profiler.analytic import compute_profile
from twobw.profiler.device import find_device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="where the results go (default: out/scale.json)")
    options = parser.parse_args()
    warn_if_busy()
    device = find_device(GIVEN["device"]["name"])
    small = profile("gpt-3.8b")
    large = compute_profile(model_config(126, 4096, 32), (1, 2, 4), device)  # and both ends
    stages = PipelineCost.of(32, StageCost(1_000_000, 2_000_000), LinkCost(100_000))
    targets = [
        _timed(
            "planning GPT 3.8B on 64 devices, s",
            2.0,
            options.repeats,
            lambda: find_plans(small, cluster(8), Training(512)),
        ),
        _timed(
            "planning 128 layers on 10,240 devices, s",
            30.0,
            options.repeats,
            lambda: find_plans(large, cluster(1280), Training(10_240)),
        ),
        _timed(
            "simulating 32 stages x 512 microbatches, s",
            2.0,
            options.repeats,
            lambda: steady_state("2bw", 512, stages),
        ),
    ]
    report("scale", {"repeats": options.repeats}, targets, options.json)


def _timed(what: str, limit: float, repeats: int, run: Callable[[], object]) -> Target:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return Target(what, median(times), limit)


if __name__ == "__main__":
    main()
