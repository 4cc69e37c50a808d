"""Cutting a row of layers into stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Costs = npt.NDArray[np.float64]
"""``costs[i, j]``: of a stage of the layers ``i <= layer < j``; infinite where ``i >= j``."""


def balance(costs: Sequence[float], num_parts: int) -> list[int]:
    """Cut ``costs`` into ``num_parts`` consecutive, non-empty parts whose largest sum is as small
    as can be, and which are otherwise as equal as can be.

    Returns:
        How many items each part has.

    Raises:
        ValueError: fewer items than parts.
    """
    return split_layers(stage_costs(costs), num_parts)


def stage_costs(layers: Sequence[float], cuts: Sequence[float] | None = None) -> Costs:
    """What every stage that there can be costs: the sum of its layers, and what its borders cost.

    Args:
        layers: costs of the layers.
        cuts: costs of a border before each layer and after the last, to each of the stages that
            it divides; the first and the last are no borders. None: they cost nothing.
    """
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(layers, dtype=np.float64))])
    border = np.zeros_like(sums) if cuts is None else np.asarray(cuts, dtype=np.float64).copy()
    border[0] = border[-1] = 0.0
    costs: Costs = (sums + border)[None, :] - (sums - border)[:, None]
    costs[np.tril_indices_from(costs)] = np.inf
    return costs


def least_costs(costs: Costs) -> list[float]:
    """For every number of stages, from 1 on, the least that the dearest stage can cost."""
    best = costs[0]
    found = [float(best[-1])]
    for _ in range(2, len(costs)):
        best = np.maximum(best[:, None], costs).min(axis=0)
        found.append(float(best[-1]))
    return found


def split_layers(
    costs: Costs, num_stages: int, fits: Callable[[int], npt.NDArray[np.bool_]] | None = None
) -> list[int]:
    """Layers of each stage such that the dearest stage costs as little as can be and, among
    all such splits, the sum of the squares is least: equal stages where these are best. By
    dynamic programming over the first layers; ``O(num_stages * layers ** 2)``.

    Args:
        costs: of all stages that there can be.
        num_stages: to cut into.
        fits: for a stage which of them may be used for it; all, if there is none.

    Raises:
        ValueError: there is no such split.
    """
    num_layers = len(costs) - 1
    if not 1 <= num_stages <= num_layers:
        raise ValueError(f"{num_layers} layers cannot be cut into {num_stages} stages")
    allowed = [
        costs if fits is None else np.where(fits(stage), costs, np.inf)
        for stage in range(num_stages)
    ]
    best = allowed[0][0]
    for stage in range(1, num_stages):
        best = np.maximum(best[:, None], allowed[stage]).min(axis=0)
    limit = best[-1]
    if not np.isfinite(limit):
        raise ValueError(f"no split of {num_layers} layers into {num_stages} stages fits")
    return _most_equal(allowed, limit)


def _most_equal(allowed: Sequence[Costs], limit: float) -> list[int]:
    """The split with the least squares, no stage above the limit; later stages larger where
    several are equal."""
    total: Costs | None = None
    cuts = []
    for costs in allowed:
        squares = np.where(costs <= limit, costs, np.inf) ** 2
        reached = squares[:1] if total is None else total[:, None] + squares
        cuts.append(reached.argmin(axis=0))
        total = reached.min(axis=0)
    sizes: list[int] = []
    end = len(allowed[0]) - 1
    for cut in reversed(cuts):
        sizes.append(end - int(cut[end]))
        end = int(cut[end])
    return sizes[::-1]
