"""What a checkpoint costs: the demo's model with and without one, side by side.

Two processes train `configs/demo.toml`'s model. Windows of so many batches that each takes
`--seconds` come in pairs, in alternating order: one saves a checkpoint after its first batch, the
other does not. The checkpoint is written to its end before the window's time is taken, so that
nothing of it falls into the next. The cost is the difference within a pair, the median over the
pairs, as a part of a minute: what one checkpoint a minute takes of the throughput.

    python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/checkpoint_cost.py
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

import twobw
from twobw.config import load_config
from twobw.training.loop import make_pipeline
from twobw.training.samples import make_samples

ROOT = Path(__file__).parents[1]
PERIOD_S = 60.0
NUM_UNTIMED = 20


class Bench:
    """One rank's part: trains the demo's batches one after another."""

    def __init__(self, folder: Path) -> None:
        self._config = load_config(ROOT / "configs/demo.toml")
        self._data = make_samples(self._config)
        self._folder = folder
        self._batch = 0
        self.pipeline = make_pipeline(self._config)

    def train(self, num_batches: int) -> None:
        size = self._config.training.global_batch_size
        for _ in range(num_batches):
            self.pipeline.train_step(*self._data.batch(self._batch * size, size))
            self._batch += 1

    def window(self, num_batches: int, *, saves: bool) -> float:
        """Seconds of a window, by rank 0's clock."""
        self.pipeline.drain()
        dist.barrier()
        start = time.monotonic()
        self.train(1)
        if saves:
            self.pipeline.save(self._folder, keep=twobw.Keep(last=2))
        self.train(num_batches - 1)
        self.pipeline.drain()
        self.pipeline.wait_until_saved()
        dist.barrier()
        return time.monotonic() - start


def from_rank_0(number: float) -> float:
    tensor = torch.tensor([number], dtype=torch.float64)
    dist.broadcast(tensor, 0)
    return float(tensor.item())


def size_of(folder: Path) -> int:
    checkpoint = max(folder.glob("step-*"))
    return sum(path.stat().st_size for path in checkpoint.iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=15.0, help="of a window")
    parser.add_argument("--rounds", type=int, default=9, help="pairs of windows")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    is_reporter = dist.get_rank() == 0
    folder = Path(tempfile.gettempdir()) / "twobw-checkpoint-cost"
    bench = Bench(folder)
    bench.train(NUM_UNTIMED)
    seconds = bench.window(NUM_UNTIMED, saves=True) / NUM_UNTIMED
    num_batches = int(from_rank_0(max(arguments.seconds / seconds, 2)))
    rows = []
    for number in range(arguments.rounds):
        order = (True, False) if number % 2 else (False, True)
        times = {saves: bench.window(num_batches, saves=saves) for saves in order}
        rows.append({"without_s": times[False], "with_s": times[True]})
        if is_reporter:
            cost = times[True] - times[False]
            print(f"{num_batches} batches: {times[False]:.3f} s without, {cost:+.3f} s with one")
    if is_reporter:
        cost = median(row["with_s"] - row["without_s"] for row in rows)
        spread = max(row["without_s"] for row in rows) - min(row["without_s"] for row in rows)
        print(
            f"a checkpoint of {size_of(folder) / 1e6:.1f} MB costs {cost:.3f} s (median of "
            f"{len(rows)}; windows without one differ by {spread:.3f} s): at one a minute "
            f"{cost / PERIOD_S:.2%} of throughput"
        )
        if arguments.json:
            result = {"num_batches": num_batches, "cost_s": cost, "rounds": rows}
            arguments.json.write_text(json.dumps(result, indent=2))
        shutil.rmtree(folder)
    bench.pipeline.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
