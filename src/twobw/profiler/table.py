"""A profile as text. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from twobw.profiler.profile import LayerProfile, ModelProfile

_COSTS = (
    *("layer", "of them", "b", "forward", "±", "backward", "±", "recompute", "±"),
    *("stash", "input", "output"),
)
_WEIGHTS = ("weights of", "parameters", "update", "±", "version copy", "optimizer")


def profile_text(profile: ModelProfile) -> str:
    """Each distinct layer's costs by microbatch size ``b``, those of its weights, and what there
    is besides: in milliseconds (± is the distance between the quartiles) and megabytes."""
    counts = Counter(profile.layers)
    entries = [*profile.entries, profile.loss]
    costs: list[tuple[str, ...]] = [_COSTS]
    for number, entry in enumerate(entries):
        costs += _cost_rows(entry, counts.get(number, 1))
    weights = [_WEIGHTS, *(_weight_row(entry) for entry in entries if entry.num_parameters)]
    if profile.kind == "analytic":  # which has no spread
        costs, weights = (
            [_without_spread(row, rows[0]) for row in rows] for rows in (costs, weights)
        )
    parts = [_title(profile), _aligned(costs), _aligned(weights), _rest(profile)]
    return "\n\n".join(parts)


def _title(profile: ModelProfile) -> str:
    conditions = [profile.precision, profile.optimizer]
    if profile.num_threads:
        threads = f"{profile.num_threads} thread{'s' * (profile.num_threads > 1)}"
        at_once = f"{profile.num_ranks} ranks at once, " if profile.num_ranks > 1 else "1 rank of "
        conditions.insert(0, at_once + threads + " each" * (profile.num_ranks > 1))
    how = "measured on" if profile.kind == "measured" else "computed for"
    return f"{profile.model}, {how} {profile.device}: {', '.join(conditions)}; in ms and MB"


def _cost_rows(entry: LayerProfile, count: int) -> list[tuple[str, ...]]:
    return [
        (
            entry.name if place == 0 else "",
            str(count) if place == 0 else "",
            str(costs.microbatch_size),
            _ms(costs.forward_ns),
            _ms(costs.forward_spread_ns),
            _ms(costs.backward_ns),
            _ms(costs.backward_spread_ns),
            _ms(costs.recompute_ns),
            _ms(costs.recompute_spread_ns),
            _mb(costs.stash_bytes),
            _mb(costs.input_bytes),
            _mb(costs.output_bytes),
        )
        for place, costs in enumerate(entry.microbatches)
    ]


def _weight_row(entry: LayerProfile) -> tuple[str, ...]:
    return (
        entry.name,
        f"{entry.num_parameters:,}",
        _ms(entry.update_ns),
        _ms(entry.update_spread_ns),
        _ms(entry.version_copy_ns),
        _mb(entry.optimizer_bytes),
    )


def _without_spread(row: tuple[str, ...], head: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(cell for cell, name in zip(row, head, strict=True) if name != "±")


def _rest(profile: ModelProfile) -> str:
    overhead, link = profile.overhead, profile.link
    lines = []
    if profile.kind == "measured":
        lines.append(
            f"clock: {profile.slowdown:.2f} times the processor time, in all times of layers; "
            "what is above 1 other programs took"
        )
        lines.append(
            f"executor: {_us(overhead.op_ns)} a forward or backward, "
            f"{_us(overhead.message_ns)} a message, {_us(overhead.batch_ns)} a batch"
        )
    if link is not None:
        lines.append(f"link: {_us(link.latency_ns)}, {link.bytes_per_second / 1e9:.2f} GB/s")
    parameters = sum(profile.layer(n).num_parameters for n in range(profile.num_layers))
    parameters -= sum(tie.num_parameters * (len(tie.layers) - 1) for tie in profile.ties)
    lines.append(f"model: {profile.num_layers} layers, {parameters:,} parameters")
    return "\n".join(lines)


def _us(ns: int) -> str:
    return f"{ns / 1e3:.0f} us"


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.3f}"


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.3f}"


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    """Columns as wide as they must be, the first to the left, the others to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
