from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twobw.planner.partition import balance


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
