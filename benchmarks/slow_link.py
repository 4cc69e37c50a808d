"""A slow network: two hosts joined by a link held to 1 Gbit/s and to 100 Mbit/s.

    sudo .venv/bin/python benchmarks/slow_link.py

The hosts are network namespaces of this machine, joined by a veth pair that ``tc ... tbf`` holds to
its rate; torchrun runs on each, as on two machines, a stage on either. The model is that of
`throughput.py`. All contestants live in the same two processes and take turns at each rate, in an
order that rotates; ratios are taken within a round, medians over the rounds. Beside them stands
what the planner predicts of the same layout from a profile of this machine and the link's rate, and
what it would choose. Skipped where namespaces cannot be made (they need root and iproute2).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from harness import CONSOLE, Seat, Target, one_thread_each, print_table, report, warn_if_busy

FULL = 0
RATES = {FULL: "not held", 1000: "1 Gbit/s", 100: "100 Mbit/s"}  # by Mbit/s
BURST_BYTES = {1000: 131_072, 100: 16_384}  # that may pass at once: a hundredth of a message or so
PAYLOAD = 1448 / 1514  # of a frame, as tbf counts it
NUM_MICROBATCHES = 4
MOST_EXTRA = 2
KEPT = 0.95  # of its throughput, asked of 2BW with more in flight on the slowest link
CONTESTANTS: dict[str, tuple[str, int]] = {
    "2bw": ("2bw", 0),
    **{f"2bw +{n} in flight": ("2bw", n) for n in range(1, MOST_EXTRA + 1)},
    "1f1b": ("1f1b", 0),
}
TORCH = "torch 1F1B"
EVERYONE = [*CONTESTANTS, TORCH]
_DEVICE = "twobw0"  # of the link, in both namespaces
_ADDRESS = "10.77.0."


@dataclass(frozen=True)
class Turn:
    """One contestant's turn: the round, the link's rate in Mbit/s, samples a second."""

    contestant: str
    round: int
    rate: int
    samples_per_second: float


# --- the hosts


def missing_for_namespaces() -> str:
    """What keeps this machine from making network namespaces; empty if nothing does."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if not (shutil.which("ip") and shutil.which("tc")):
        return "ip and tc are needed (iproute2)"
    if os.geteuid():
        return "root is needed"
    name = f"twobw-{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    if made.returncode:
        return made.stderr.decode().strip() or "ip netns add fails"
    subprocess.run(["ip", "netns", "delete", name], check=False)
    return ""


@contextmanager
def two_hosts() -> Iterator[tuple[str, str]]:
    """Two namespaces with a link; they go with this block."""
    names = (f"twobw-{os.getpid()}-a", f"twobw-{os.getpid()}-b")
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        pair = ("type", "veth", "peer", "name", _DEVICE, "netns", names[1])
        ip("link", "add", _DEVICE, "netns", names[0], *pair)
        for host, name in enumerate(names, 1):
            ip("-n", name, "address", "add", f"{_ADDRESS}{host}/24", "dev", _DEVICE)
            ip("-n", name, "link", "set", _DEVICE, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def hold_link(rate: int) -> None:
    """In a host: hold what leaves it to a rate."""
    subprocess.run(
        ["tc", "qdisc", "delete", "dev", _DEVICE, "root"], capture_output=True, check=False
    )
    if rate != FULL:
        shape = f"tbf rate {rate}mbit burst {BURST_BYTES[rate]} latency 200ms".split()
        subprocess.run(["tc", "qdisc", "add", "dev", _DEVICE, "root", *shape], check=True)


def run_on_hosts(hosts: tuple[str, str], arguments: list[str], out: Path) -> list[Turn]:
    """Start torchrun on each host; the turns that rank 0 saw."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    torchrun += ["--nproc-per-node", "1", "--rdzv-backend", "c10d"]
    torchrun += ["--rdzv-endpoint", f"{_ADDRESS}1:29400"]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": _DEVICE}
    script = [__file__, "--worker", str(out), *arguments]
    ranks = []
    for number, host in enumerate(hosts):
        here = ["--local-addr", f"{_ADDRESS}{number + 1}", "--rdzv-conf", f"is_host={number == 0}"]
        command = ["ip", "netns", "exec", host, *torchrun, *here, *script]
        ranks.append(subprocess.Popen(command, env=environment))
    try:
        codes = [rank.wait() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(codes):
        raise RuntimeError(f"torchrun ended with {codes}")
    return [Turn(**turn) for turn in json.loads(out.read_text())]


# --- the ranks


class Joined(Seat):
    """A seat in a process group that there is already."""

    def join(self) -> None:
        """Nothing to do."""


def work(out: Path, options: argparse.Namespace) -> None:
    """A rank: all contestants in turn, at each rate."""
    import torch
    from contestants import MICROBATCH_SIZE, TorchPipelining, TwoBW
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    seat = Joined(rank, 2, "")
    made: dict[str, Any] = {
        name: TwoBW(seat, NUM_MICROBATCHES, schedule, extra_in_flight=extra)
        for name, (schedule, extra) in CONTESTANTS.items()
    }
    made[TORCH] = TorchPipelining(seat, NUM_MICROBATCHES, "Schedule1F1B")
    samples = options.batches * NUM_MICROBATCHES * MICROBATCH_SIZE
    turns = []
    for number in range(options.rounds):
        for rate in RATES:
            hold_link(rate)
            for name in EVERYONE[number % len(EVERYONE) :] + EVERYONE[: number % len(EVERYONE)]:
                distributed.barrier()
                seconds = torch.tensor([made[name].turn(2, options.batches).seconds])
                if name in CONTESTANTS:
                    made[name].drain()
                distributed.all_reduce(seconds)  # of both ranks the mean counts
                turns.append(Turn(name, number, rate, samples / (seconds.item() / 2)))
        if rank == 0:
            print(f"round {number + 1} of {options.rounds}", flush=True)
    if rank == 0:
        out.write_text(json.dumps([vars(turn) for turn in turns]))
    distributed.barrier()
    os._exit(0)  # no orderly end of groups whose threads may wait


# --- what is predicted


def predictions() -> tuple[dict[tuple[str, int], float], dict[int, str]]:
    """Samples a second of each contestant of ours at each rate, and the planner's choice."""
    from contestants import MICROBATCH_SIZE, SPLIT

    from twobw.config import load_config
    from twobw.planner.cluster import ClusterSpec
    from twobw.planner.configuration import Configuration, Training
    from twobw.planner.prediction import predict
    from twobw.planner.search import find_plans
    from twobw.profiler.measure import measure_profile
    from twobw.profiler.profile import LinkProfile

    batch = NUM_MICROBATCHES * MICROBATCH_SIZE
    with tempfile.TemporaryDirectory(prefix="twobw-bench-") as folder:
        path = Path(folder, "bench.toml")
        path.write_text(
            '[model]\nname = "gpt-bench"\n[optimizer]\nlr = 3e-4\nweight_decay = 0.1\n'
            f"[training]\nnum_batches = 1\nglobal_batch_size = {batch}\n"
        )
        profile = measure_profile(load_config(path), [MICROBATCH_SIZE])
    assert profile.link is not None, "two ranks have a link"
    training = Training(batch)
    predicted: dict[tuple[str, int], float] = {}
    chosen: dict[int, str] = {}
    for rate in RATES:
        link = profile.link
        if rate != FULL:
            bytes_per_second = round(rate * 1e6 / 8 * PAYLOAD)
            link = LinkProfile(latency_ns=link.latency_ns, bytes_per_second=bytes_per_second)
        cluster = ClusterSpec(
            name=f"two hosts, {RATES[rate]}",
            nodes=2,
            devices_per_node=1,
            device_memory_bytes=4 * 10**9,
            inside=link,
            between=link,
        )
        for name, (schedule, extra) in CONTESTANTS.items():
            configuration = Configuration(
                2, 1, MICROBATCH_SIZE, NUM_MICROBATCHES, schedule, extra_in_flight=extra
            )
            plan = predict(profile, cluster, training, configuration, tuple(SPLIT))
            predicted[name, rate] = plan.samples_per_second
        best = find_plans(profile, cluster, training, top=1).plans[0]
        chosen[rate] = f"{best.layout}, layers {list(best.split)}"
    return predicted, chosen


# --- what comes of it


def summarise(
    turns: list[Turn], predicted: dict[tuple[str, int], float]
) -> tuple[list[dict[str, Any]], list[Target]]:
    """A row for each contestant and rate."""
    speed = {(t.contestant, t.rate, t.round): t.samples_per_second for t in turns}
    rounds = sorted({turn.round for turn in turns})
    rows = []
    for name in EVERYONE:
        for rate in RATES:
            measured = median(speed[name, rate, number] for number in rounds)
            kept = [speed[name, rate, n] / speed["2bw", FULL, n] for n in rounds]
            own = [speed[name, rate, n] / speed[name, FULL, n] for n in rounds]
            said = predicted.get((name, rate))
            rows.append(
                {
                    "contestant": name,
                    "rate": rate,
                    "samples_per_second": measured,
                    "of_2bw_at_full": median(kept),
                    "of_own_at_full": median(own),
                    "predicted_samples_per_second": said,
                    "predicted_over_measured": None if said is None else said / measured,
                }
            )
    slowest = min(rate for rate in RATES if rate)
    best = max(
        row["of_own_at_full"]
        for row in rows
        if row["rate"] == slowest and "in flight" in row["contestant"]
    )
    what = f"2bw with more in flight at {RATES[slowest]}, of its speed when not held"
    return rows, [Target(what, best, KEPT, at_least=True)]


def show(rows: list[dict[str, Any]], chosen: dict[int, str]) -> None:
    print_table(
        f"Samples a second of two hosts, m = {NUM_MICROBATCHES}",
        ["contestant", "link", "measured", "of its full speed", "of 2bw's", "predicted", "ratio"],
        [
            [
                row["contestant"],
                RATES[row["rate"]],
                f"{row['samples_per_second']:.2f}",
                f"{row['of_own_at_full']:.3f}",
                f"{row['of_2bw_at_full']:.3f}",
                f"{said:.2f}" if (said := row["predicted_samples_per_second"]) else "-",
                f"{ratio:.3f}" if (ratio := row["predicted_over_measured"]) else "-",
            ]
            for row in rows
        ],
    )
    for rate, layout in chosen.items():
        CONSOLE.print(f"the planner's choice, link {RATES[rate]}: {layout}", soft_wrap=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=4, help="timed, of a turn")
    parser.add_argument("--json", type=Path, help="instead of out/slow_link.json")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options)
        return
    if missing := missing_for_namespaces():
        CONSOLE.print(f"skipped: network namespaces cannot be made here: {missing}")
        return
    warn_if_busy()
    with one_thread_each():
        predicted, chosen = predictions()
        with two_hosts() as hosts, tempfile.TemporaryDirectory() as folder:
            arguments = ["--rounds", str(options.rounds), "--batches", str(options.batches)]
            turns = run_on_hosts(hosts, arguments, Path(folder, "turns.json"))
    rows, targets = summarise(turns, predicted)
    show(rows, chosen)
    results = {"rows": rows, "turns": [vars(turn) for turn in turns], "chosen": chosen}
    report("slow_link", results, targets, options.json)


if __name__ == "__main__":
    main()
