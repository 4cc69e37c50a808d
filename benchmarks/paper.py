"""The experiments of the 2BW paper (Narayanan et al., 2021, section 5), by analytic profile
and simulation: each figure of the paper beside ours and their ratio.

    python benchmarks/paper.py [--json FILE]

Everything is computed, nothing measured: layers by their FLOPs and bytes on a described V100,
pipelines by the planner, tensor parallelism by `paper_systems.tensor_parallel`. What is taken as
given is in `paper.toml`, with its source; no constant is fitted to a figure of the paper. The
paper's rates and memory are read off plots. Where ours is off by more than 20 %, the reason is
printed, or that it is not known.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from harness import CONSOLE, print_table, report
from paper_systems import (
    GIVEN,
    GPUS_PER_SERVER,
    MICROBATCH_SIZES,
    SCHEDULES,
    SEQUENCE,
    SYSTEMS,
    TENSOR,
    WITH,
    WITHOUT,
    Prediction,
    at,
    gpipe_in_parts,
    largest_gpt,
    predict,
    tensor_parallel,
)

from twobw.profiler.device import find_device

BATCHES = (64, 256)  # of the paper's figure; a server each
MEMORY_AT = 8  # microbatch size: the largest that a batch of 64 allows 8 stages with m >= p
RECOMPUTE_BATCH = 256
OFF = 0.2  # from here on a reason is given
OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class Figure:
    """A number of the paper beside ours.

    Attributes:
        what: in short.
        paper: its figure; 0: it ran out of memory; None: it has none.
        ours: 0: it does not fit.
        how: ours, by which configuration.
    """

    what: str
    paper: float | None
    ours: float
    how: str = ""

    @property
    def ratio(self) -> float | None:
        """Ours by the paper's."""
        return self.ours / self.paper if self.paper and self.ours else None

    @property
    def is_off(self) -> bool:
        """Whether a reason is due."""
        if self.paper is None:
            return False
        if self.ratio is None:
            return bool(self.paper) != bool(self.ours)
        return abs(self.ratio - 1) > OFF

    def cells(self) -> tuple[str, str, str]:
        """Paper's, ours, ratio."""
        paper = "-" if self.paper is None else _number(self.paper)
        ratio = "-" if self.ratio is None else f"{self.ratio:.2f}"
        return paper, _number(self.ours), ratio + " *" * self.is_off


def _number(value: float) -> str:
    return f"{value:.1f}" if value else OUT_OF_MEMORY


def reason(figure: Figure) -> str:
    """Why a figure is off."""
    return str(GIVEN["reasons"].get(figure.what, "not known"))


def systems() -> list[Figure]:
    """GPT 2.2B on one server: rates at both batches, then memory, of each system."""
    figures: list[Figure] = []
    for system in SYSTEMS:
        given = GIVEN["figures"]["systems"][system]
        for batch, paper in zip(BATCHES, given["rate"], strict=True):
            ours = (
                gpipe_in_parts("gpt-2.2b", 1, batch, pp=GPUS_PER_SERVER)
                if system == "GPipe"
                else predict(system, "gpt-2.2b", 1, batch, pp=GPUS_PER_SERVER)
            )
            figures.append(_figure(f"{system}, {batch}", paper, ours))
        held = max(given.get("memory_gb", [0]))
        figures.append(_memory_figure(system, held))
    return figures


def _figure(what: str, paper: float | None, ours: Prediction | None) -> Figure:
    return Figure(what, paper, ours.rate if ours else 0.0, ours.how if ours else "")


def _memory_figure(system: str, paper: float) -> Figure:
    """At one configuration for all, at the smaller batch."""
    batch, size = BATCHES[0], MEMORY_AT
    if system == TENSOR:
        ours = tensor_parallel("gpt-2.2b", 1, batch, size, recomputes=True)
    else:
        ours = at("gpt-2.2b", SCHEDULES[system], GPUS_PER_SERVER, 1, batch, size, "stage")
    memory = ours.memory_gb if ours else 0.0
    return Figure(f"{system}, memory", paper, memory, ours.how if ours else "")


def recompute() -> list[Figure]:
    """2BW at (w, p) = (1, 8) by microbatch size, with recompute and without."""
    figures: list[Figure] = []
    for model, given in GIVEN["figures"]["recompute"].items():
        for name, choices in (("with", WITH), ("without", WITHOUT)):
            for size in MICROBATCH_SIZES:
                found = [
                    at(model, "2bw", GPUS_PER_SERVER, 1, RECOMPUTE_BATCH, size, choice)
                    for choice in choices
                ]
                ours = max((one for one in found if one), key=lambda one: one.rate, default=None)
                paper = given[name].get(str(size))
                figures.append(_figure(f"{model} {name}, {size}", paper, ours))
    return figures


def predictions() -> list[Figure]:
    """The other models, on one server and on eight."""
    return [
        _figure(
            f"{model}, {servers * GPUS_PER_SERVER}, {batch * servers}, {system}",
            None,
            predict(system, model, servers, batch * servers),
        )
        for model in GIVEN["models"]
        if model != "gpt-2.2b"
        for servers in (1, 8)
        for batch in BATCHES
        for system in SYSTEMS
    ]


def print_given() -> None:
    """Every constant and where it is from."""
    device = find_device(GIVEN["device"]["name"])
    rates = ", ".join(
        f"{device.flops_per_second('fp16', size * SEQUENCE) / 1e12:.1f}"
        for size in MICROBATCH_SIZES
    )
    lines = [
        f"{device.name}: {rates} TFLOP/s in fp16 for microbatches of "
        f"{', '.join(map(str, MICROBATCH_SIZES))} x {SEQUENCE} tokens, "
        f"{device.memory_bytes_per_second / 1e9:.0f} GB/s (src/twobw/profiler/device.py)",
        f"memory: {GIVEN['device']['memory_bytes'] / 1e9:.1f} GB: {GIVEN['device']['source']}",
        f"products alone: {GIVEN['products']['flops_per_second'] / 1e12:.0f} TFLOP/s: "
        f"{GIVEN['products']['source']}",
    ]
    lines += [
        f"link, {name.replace('_', '-')}: {link['bytes_per_second'] / 1e9:.3f} GB/s, "
        f"{link['latency_ns'] / 1e3:.1f} us: {link['source']}"
        for name, link in GIVEN["links"].items()
    ]
    CONSOLE.print("Given\n  " + "\n  ".join(lines) + "\n", soft_wrap=True, markup=False)


def print_systems(figures: Sequence[Figure]) -> None:
    columns = ("", *(word for batch in BATCHES for word in (f"batch {batch}", "ours", "ratio")))
    rows, configurations = [], []
    triples = [figures[start : start + 3] for start in range(0, len(figures), 3)]
    for system, (small, large, memory) in zip(SYSTEMS, triples, strict=True):
        rows.append((system, *small.cells(), *large.cells(), *memory.cells()))
        configurations.append(f"  {system}: {small.how}; {large.how}; memory {memory.how}")
    print_table(
        "GPT 2.2B on 8 V100s: sequences a second, the paper's and ours; GB of the fullest GPU",
        (*columns, "GB", "ours", "ratio"),
        rows,
    )
    CONSOLE.print("Ours, (w, p):\n" + "\n".join(configurations), soft_wrap=True, markup=False)
    CONSOLE.print(
        f"Rates: each system's fastest that fits. Memory: for all at b={MEMORY_AT} with recompute, "
        "since the paper's is the same at both batches, and 2BW's m >= p allows no more at 64.\n",
        soft_wrap=True,
    )


def print_recompute(figures: Sequence[Figure]) -> None:
    count = len(MICROBATCH_SIZES)
    rows = []
    for start in range(0, len(figures), count):
        part = figures[start : start + count]
        name = part[0].what.rsplit(",", 1)[0]
        cells = [figure.cells() for figure in part]
        for label, place in ((name, 0), ("  ours", 1), ("  ratio", 2)):
            rows.append((label, *(cell[place].replace(OUT_OF_MEMORY, "OOM") for cell in cells)))
    print_table(
        "Recompute, 2BW at (w, p) = (1, 8): sequences a second by microbatch size",
        ("", *(f"b={size}" for size in MICROBATCH_SIZES)),
        rows,
    )
    CONSOLE.print(f"Ours at batches of {RECOMPUTE_BATCH}.\n", soft_wrap=True)


def print_predictions(figures: Sequence[Figure]) -> None:
    count = len(SYSTEMS)
    rows = []
    for start in range(0, len(figures), count):
        part = figures[start : start + count]
        rates = (figure.cells()[1].replace(OUT_OF_MEMORY, "OOM") for figure in part)
        model, gpus, batch, _ = part[0].what.split(", ")
        rows.append((model, gpus, batch, "-", *rates))
    print_table(
        "Predictions alone: sequences a second of each system, at any depth and width",
        ("", "GPUs", "batch", "paper", *SYSTEMS),
        rows,
    )
    CONSOLE.print("OOM: nothing fits; GPipe flushes once a batch here.\n")


def print_largest(sizes: dict[int, tuple[int, float]]) -> None:
    rows = [
        (str(pp), "-", str(blocks), f"{billions:.2f}") for pp, (blocks, billions) in sizes.items()
    ]
    print_table(
        "The largest GPT of hidden size 1,024 that fits, with recompute, b=1",
        ("p", "paper", "blocks", "1e9 parameters"),
        rows,
    )


def print_reasons(figures: Iterable[Figure]) -> None:
    off = [figure for figure in figures if figure.is_off]
    for figure in off:
        paper, ours, _ = figure.cells()
        CONSOLE.print(
            f"* {figure.what}: {paper}, ours {ours}: {reason(figure)}",
            soft_wrap=True,
            markup=False,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where the results go (default: out/paper.json)")
    options = parser.parse_args()
    print_given()
    compared = systems()
    print_systems(compared)
    by_size = recompute()
    print_recompute(by_size)
    print_reasons([*compared, *by_size])
    CONSOLE.print()
    alone = predictions()
    print_predictions(alone)
    sizes = {pp: largest_gpt(pp) for pp in (1, 2, 4, 8, 16, 32, 64)}
    print_largest(sizes)
    results = {
        "given": GIVEN,
        "systems": [_record(figure) for figure in compared],
        "recompute": [_record(figure) for figure in by_size],
        "predictions": [_record(figure) for figure in alone],
        "largest": [
            {"pp": pp, "blocks": blocks, "billions_of_parameters": billions}
            for pp, (blocks, billions) in sizes.items()
        ],
    }
    report("paper", results, [], options.json)


def _record(figure: Figure) -> dict[str, object]:
    record = {**asdict(figure), "ratio": figure.ratio}
    return record | {"reason": reason(figure)} if figure.is_off else record


if __name__ == "__main__":
    main()
