import pytest

from twobw.core.rank_grid import RankGrid


def test_replicas_of_a_stage_are_neighbours() -> None:
    grid = RankGrid(pp=3, dp=2)
    assert [grid.replicas(stage) for stage in range(3)] == [[0, 1], [2, 3], [4, 5]]
    assert grid.pipeline(1) == [1, 3, 5]


def test_stages_of_a_pipeline_are_neighbours() -> None:
    grid = RankGrid(pp=3, dp=2, placement="pipelines")
    assert [grid.pipeline(replica) for replica in range(2)] == [[0, 1, 2], [3, 4, 5]]
    assert grid.replicas(1) == [1, 4]


@pytest.mark.parametrize("placement", ["replicas", "pipelines"])
def test_a_rank_is_where_its_place_says(placement) -> None:
    grid = RankGrid(3, 2, placement)
    assert [grid.rank(*place) for place in grid.places()] == list(range(6))
