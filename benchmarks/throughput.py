"""How fast: this runtime beside others, and beside the ideal, in tokens per second.

Two stages of one thread each train the same GPT (width 256, 8 blocks, sequences of 128 bytes,
microbatches of 4, AdamW, fp32). The ideal is what two such processes can do on this machine at
most: each trains the whole model on its own, at the same time, and their tokens/s are added.

Every contestant's processes are started once and wait on a pipe while others work. A round gives
each a turn, in an order that rotates; a turn trains a few batches untimed, then some by the clock.
The clock starts and stops at the same point of a batch and nothing is drained in between for its
sake, so exactly the timed batches' forwards, backwards and updates lie between. Of a contestant's
processes the mean counts. Ratios are taken within a round, and medians over the rounds. What
else ran on the machine meanwhile is printed beside them ("others", in cores): numbers are worth
something only where that is near zero.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import multiprocessing
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

import contestants
import harness
from contestants import CONTESTANTS, MICROBATCH_SIZE, MODEL, Turn
from harness import CONSOLE, Target, Team

IDEAL = "ideal"
TORCH = "torch 1F1B"
NUM_PROCESSES = 2
GAIN_OVER_TORCH = {2: 1.45, 4: 1.22, 8: 1.10}
NUM_COMPARED = 3  # batches whose losses are compared; the third has seen two updates
LOSS_TOLERANCE = 1e-4  # relative; sums are taken in another order, and AdamW divides by small roots


def main() -> None:
    """Measure, print, write."""
    options = parse()
    harness.warn_if_busy()
    names = options.contestants
    if "DeepSpeed" in names and importlib.util.find_spec("deepspeed") is None:
        names.remove("DeepSpeed")
        CONSOLE.print("DeepSpeed is skipped: the bench extra is not installed")
    results, targets = {}, []
    for num_microbatches in options.microbatches:
        result = measure(names, num_microbatches, options)
        results[str(num_microbatches)] = result
        show(result, num_microbatches)
        targets += judge(result, num_microbatches)
    harness.report("throughput", results, targets, options.json)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--microbatches", type=int, nargs="+", default=[2, 4, 8], metavar="M", help="a batch")
    add(
        "--contestants",
        type=contestant_names,
        default=",".join(CONTESTANTS),
        metavar="A,B,...",
        help=f"of {', '.join(CONTESTANTS)} (default: all); {IDEAL} runs always",
    )
    add("--rounds", type=int, default=5, help="turns of each contestant (default 5)")
    add(
        "--batches",
        type=int,
        help="timed batches a turn (default: 12 microbatches' worth, at least 2)",
    )
    add("--json", type=Path, metavar="FILE", help="default: out/throughput.json beside this file")
    add("--quick", action="store_true", help="2 rounds of short turns: does it run?")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.batches = 2, options.batches or 2
    return options


def contestant_names(text: str) -> list[str]:
    """Names out of the table's first column, with or without its ``twobw``, in its order. The
    ideal is always among them: all else is measured against it.

    Raises:
        argparse.ArgumentTypeError: there is no such contestant.
    """
    chosen = {IDEAL}
    for given in text.split(","):
        name = given.strip().removeprefix("twobw ")
        if name not in CONTESTANTS:
            near = difflib.get_close_matches(name, CONTESTANTS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(CONTESTANTS)}{hint}")
        chosen.add(name)
    return [name for name in CONTESTANTS if name in chosen]


def measure(names: list[str], num_microbatches: int, options: argparse.Namespace) -> dict[str, Any]:
    """Turns of all contestants at one number of microbatches."""
    num_timed = options.batches or max(2, 12 // num_microbatches)
    num_untimed = max(1, 4 // num_microbatches)
    tokens = num_timed * num_microbatches * MICROBATCH_SIZE * MODEL.sequence_length
    speeds: dict[str, list[float]] = {name: [] for name in names}
    others: dict[str, list[float | None]] = {name: [] for name in names}
    teams = start(names, num_microbatches)
    try:
        first = {name: turns_of(team, 0, NUM_COMPARED)[0] for name, team in teams.items()}
        losses = {name: turns[-1].losses for name, turns in first.items()}
        check_losses(losses)
        for round_ in range(options.rounds):
            shift = round_ % len(names)
            for name in names[shift:] + names[:shift]:
                turns, other_cores = turns_of(teams[name], num_untimed, num_timed)
                others[name].append(other_cores)
                speeds[name].append(tokens_per_second(name, tokens, turns))
            CONSOLE.print(f"m = {num_microbatches}: round {round_ + 1} of {options.rounds}")
    finally:
        for team in teams.values():
            team.close()
    return {
        "num_microbatches": num_microbatches,
        "timed_batches_a_turn": num_timed,
        "untimed_batches_a_turn": num_untimed,
        "contestants": {
            name: {**summary(name, speeds, losses), "other_cores_by_round": others[name]}
            for name in names
        },
    }


def start(names: list[str], num_microbatches: int) -> dict[str, Team]:
    """One team a contestant; all start at once."""
    teams = {}
    with harness.one_thread_each():
        for name in names:
            build, settings = CONTESTANTS[name]
            arguments: dict[str, Any] = {"num_microbatches": num_microbatches, **settings}
            if build is contestants.Ideal:
                arguments["num_finished"] = multiprocessing.get_context("spawn").Value("i", 0)
            teams[name] = Team(name, build, NUM_PROCESSES, arguments)
    for team in teams.values():
        team.wait_until_built()
    return teams


def turns_of(team: Team, num_untimed: int, num_timed: int) -> tuple[list[Turn], float | None]:
    """One turn of a team, by rank; and how many cores' time others took meanwhile, if known."""
    wall, before = time.perf_counter(), harness.machine_cpu_seconds()
    turns: list[Turn] = team.call("turn", num_untimed, num_timed)
    wall, after = time.perf_counter() - wall, harness.machine_cpu_seconds()
    if before is None or after is None:
        return turns, None
    others = after - before - sum(turn.cpu_seconds for turn in turns)
    return turns, max(0.0, others) / wall


def tokens_per_second(name: str, tokens: int, turns: list[Turn]) -> float:
    """Speed of a team by its mean process, or for the ideal the sum.

    The slowest would not do: a stage may begin its window some milliseconds ahead of where it ends
    it, and the other then the reverse; the most of the two would add that to every window.
    """
    if name == IDEAL:
        return sum(tokens / turn.seconds for turn in turns)
    return tokens / mean(turn.seconds for turn in turns)


def check_losses(losses: dict[str, list[float]]) -> None:
    """All do the same work: the same losses, except that 2BW's differ from the second batch on.

    Raises:
        RuntimeError: a contestant trains something else.
    """
    for name, values in losses.items():
        # From batch 1 on 2BW's weights are one update behind.
        num_same = 1 if name == "2bw" else len(values)
        for batch, (value, wanted) in enumerate(zip(values, losses[IDEAL], strict=True)):
            if batch < num_same and abs(value - wanted) > LOSS_TOLERANCE * wanted:
                raise RuntimeError(
                    f"{name} does other work: loss {value:.6f} at batch {batch}, "
                    f"where a single process has {wanted:.6f}"
                )


def summary(
    name: str, speeds: dict[str, list[float]], losses: dict[str, list[float]]
) -> dict[str, Any]:
    """What the table and the JSON say of a contestant."""
    return {
        "tokens_per_second": median(speeds[name]),
        "tokens_per_second_by_round": speeds[name],
        "of_ideal": ratio(speeds, name, IDEAL),
        "over_torch_1f1b": ratio(speeds, name, TORCH) if TORCH in speeds else None,
        "loss_of_first_turn": losses[name],
    }


def ratio(speeds: dict[str, list[float]], name: str, other: str) -> dict[str, float]:
    """Median, least and most of a round's ratio."""
    ratios = [a / b for a, b in zip(speeds[name], speeds[other], strict=True)]
    return {"median": median(ratios), "min": min(ratios), "max": max(ratios)}


def show(result: dict[str, Any], num_microbatches: int) -> None:
    """The table of one number of microbatches."""
    rows = []
    for name, values in result["contestants"].items():
        of_ideal, losses = values["of_ideal"], values["loss_of_first_turn"]
        over_torch = values["over_torch_1f1b"]
        others = [cores for cores in values["other_cores_by_round"] if cores is not None]
        rows.append(
            [
                name if name.startswith(("torch", "Deep", IDEAL)) else f"twobw {name}",
                f"{values['tokens_per_second']:.0f}",
                f"{of_ideal['median']:.3f}",
                f"{of_ideal['min']:.3f} to {of_ideal['max']:.3f}",
                f"{over_torch['median']:.3f}" if over_torch else "",
                f"{losses[0]:.4f}",
                f"{losses[-1]:.4f}",
                f"{max(others):.2f}" if others else "",
            ]
        )
    num_batches = len(losses)
    columns = ["", "tokens/s", "of ideal", "over rounds", "x torch 1F1B", "loss, batch 0"]
    columns += [f"batch {num_batches - 1}", "others, most"]
    harness.print_table(f"m = {num_microbatches} microbatches a batch", columns, rows)


def judge(result: dict[str, Any], num_microbatches: int) -> list[Target]:
    """The targets of the contestants that ran."""
    ran, at = result["contestants"], f"at m = {num_microbatches}"
    limits = [
        ("2bw of ideal", "2bw", "of_ideal", 0.95),
        ("2bw over torch's 1F1B", "2bw", "over_torch_1f1b", GAIN_OVER_TORCH.get(num_microbatches)),
        ("1f1b over torch's", "1f1b", "over_torch_1f1b", 1.0),
    ]
    return [
        Target(f"{what} {at}", ran[name][against]["median"], limit, at_least=True)
        for what, name, against, limit in limits
        if limit is not None and name in ran and ran[name][against] is not None
    ]


if __name__ == "__main__":
    main()
