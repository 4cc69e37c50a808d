import pytest

from tests.planner.support import cluster
from twobw.core.costs import LinkCost
from twobw.planner.placement import Ring, group_link, surroundings
from twobw.profiler.profile import LinkProfile

INSIDE, BETWEEN = 1e12, 1e11


def test_one_node_has_its_own_links_alone() -> None:
    where = surroundings(cluster(8), 4, 2, "replicas")
    assert where.links == (LinkCost(bytes_per_second=INSIDE),) * 3
    assert where.rings == (Ring(2, 0, INSIDE),) * 4


def test_replicas_within_nodes_share_the_link_for_messages() -> None:
    where = surroundings(cluster(4, nodes=2), 2, 4, "replicas")
    assert where.links == (LinkCost(bytes_per_second=BETWEEN / 4),)
    assert where.rings == (Ring(4, 0, INSIDE),) * 2
    assert where.slowest_link == where.links[0]


def test_pipelines_within_nodes_share_it_for_reductions() -> None:
    where = surroundings(cluster(4, nodes=2), 4, 2, "pipelines")
    assert where.links == (LinkCost(bytes_per_second=INSIDE),) * 3
    assert where.rings == (Ring(2, 0, BETWEEN / 4),) * 4
    assert where.slowest_ring == Ring(2, 0, BETWEEN / 4)


def test_two_stages_in_a_node() -> None:
    where = surroundings(cluster(4, nodes=2), 4, 2, "replicas")
    speeds = [link.bytes_per_second for link in where.links]
    assert speeds == [INSIDE, BETWEEN / 2, INSIDE]
    assert all(ring.bytes_per_second == INSIDE for ring in where.rings)


@pytest.mark.parametrize(("size", "expected"), [(1, 0), (2, 1000 + 2 * 7), (4, 1500 + 6 * 7)])
def test_an_all_reduce_sends_everything_nearly_twice(size: int, expected: int) -> None:
    assert Ring(size, 7, 1e9).all_reduce_ns(1000) == expected


def test_a_broadcast_of_shares_sends_it_nearly_once() -> None:
    assert Ring(4, 7, 1e9).broadcast_ns(1000) == 750 + 3 * 7


def test_a_group_is_as_slow_as_the_slowest_link_between() -> None:
    slow = LinkProfile(latency_ns=9, bytes_per_second=10**9)
    spec = cluster(2, nodes=2, between=slow)
    where = surroundings(spec, 4, 1, "replicas")
    assert group_link(spec, (0, 3), where) == Ring(2, 9, 1e9)
    assert group_link(spec, (0, 1), where) == Ring(2, 0, INSIDE)
    assert group_link(spec, (2,), where).size == 1
