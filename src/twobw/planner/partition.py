"""Cutting a row of layers into stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def balance(costs: Sequence[float], num_parts: int) -> list[int]:
    """Cut ``costs`` into ``num_parts`` consecutive, non-empty parts whose largest sum is as small
    as can be (dynamic programming over prefixes).

    Returns:
        How many items each part has.

    Raises:
        ValueError: fewer items than parts.
    """
    if not 1 <= num_parts <= len(costs):
        raise ValueError(f"{len(costs)} layers cannot be cut into {num_parts} stages")
    prefix = [0.0, *accumulate(costs)]
    ends = range(len(costs) + 1)
    # best[n]: the smallest largest sum of the first n items in the parts made so far
    best: list[float] = [*prefix]
    best[0] = float("inf")
    cuts: list[list[int]] = []
    for part in range(1, num_parts):
        previous, best, cut = best, [float("inf")] * len(prefix), [0] * len(prefix)
        for end in ends[part + 1 :]:
            options = ((max(previous[c], prefix[end] - prefix[c]), c) for c in range(part, end))
            best[end], cut[end] = min(options)
        cuts.append(cut)
    sizes: list[int] = []
    end = len(costs)
    for cut in reversed(cuts):
        sizes.append(end - cut[end])
        end = cut[end]
    return [end, *reversed(sizes)]
