from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twobw.planner.partition import balance, least_costs, split_layers, stage_costs


def brute_force(costs: list[int], num_parts: int) -> int:
    n = len(costs)
    return min(
        max(sum(costs[a:b]) for a, b in zip((0, *cuts), (*cuts, n), strict=True))
        for cuts in combinations(range(1, n), num_parts - 1)
    )


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.data())
def test_largest_part_is_as_small_as_can_be(costs: list[int], data: st.DataObject) -> None:
    num_parts = data.draw(st.integers(1, len(costs)))
    sizes = balance(costs, num_parts)
    assert len(sizes) == num_parts
    assert min(sizes) >= 1
    assert sum(sizes) == len(costs)
    starts = [sum(sizes[:i]) for i in range(num_parts)]
    sums = [sum(costs[a : a + n]) for a, n in zip(starts, sizes, strict=True)]
    assert max(sums) == brute_force(costs, num_parts)


@pytest.mark.parametrize("num_parts", [0, 4])
def test_more_parts_than_items_are_refused(num_parts: int) -> None:
    with pytest.raises(ValueError, match=f"3 layers cannot be cut into {num_parts} stages"):
        balance([1, 2, 3], num_parts)


def test_equal_stages_where_these_are_best() -> None:
    assert balance([1] * 8, 4) == [2, 2, 2, 2]
    assert balance([3, 1, 1, 1, 3], 3) == [1, 3, 1]
    assert balance([4, 1, 1, 1, 1], 3) == [1, 2, 2]


@given(
    st.lists(st.integers(0, 20), min_size=2, max_size=7),
    st.lists(st.integers(0, 20), min_size=8, max_size=8),
    st.data(),
)
def test_borders_count_for_both_stages(
    costs: list[int], cuts: list[int], data: st.DataObject
) -> None:
    n = len(costs)
    num_parts = data.draw(st.integers(1, n))
    border = [0, *cuts[1:n], 0]
    table = stage_costs(costs, border)
    best = min(
        max(sum(costs[a:b]) + border[a] + border[b] for a, b in pairwise((0, *inner, n)))
        for inner in combinations(range(1, n), num_parts - 1)
    )
    assert least_costs(table)[num_parts - 1] == best
    sizes = split_layers(table, num_parts)
    ends = [0, *accumulate(sizes)]
    assert max(table[a, b] for a, b in pairwise(ends)) == best


@given(st.lists(st.integers(1, 20), min_size=3, max_size=7), st.integers(5, 40))
def test_only_stages_that_fit(costs: list[int], most: int) -> None:
    """The first stage may have half as much as the others."""
    table = stage_costs(costs)
    limits = [most / 2, most, most]
    n = len(costs)
    all_sums = [
        [sum(costs[a:b]) for a, b in pairwise((0, *inner, n))]
        for inner in combinations(range(1, n), 2)
    ]
    splits = [
        max(sums)
        for sums in all_sums
        if all(s <= limit for s, limit in zip(sums, limits, strict=True))
    ]
    if not splits:
        with pytest.raises(ValueError, match=f"no split of {n} layers into 3 stages fits"):
            split_layers(table, 3, lambda stage: table <= limits[stage])
        return
    sizes = split_layers(table, 3, lambda stage: table <= limits[stage])
    sums = [table[a, b] for a, b in pairwise([0, *accumulate(sizes)])]
    assert max(sums) == min(splits)
    assert all(s <= limit for s, limit in zip(sums, limits, strict=True))
