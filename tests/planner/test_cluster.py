from pathlib import Path

import pytest

from twobw.planner.cluster import ClusterError, load_cluster

GOOD = """
name = "two servers"
nodes = 2
devices_per_node = 8
device_memory_bytes = 16_000_000_000
[inside]
bytes_per_second = 100_000_000_000
latency_ns = 10_000
[between]
bytes_per_second = 3_125_000_000
latency_ns = 50_000
"""


def test_a_cluster_from_toml(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(GOOD)
    cluster = load_cluster(path)
    assert cluster.num_devices == 16
    assert cluster.link(crosses=True).bytes_per_second == 3_125_000_000
    assert cluster.link(crosses=False).latency_ns == 10_000


def test_a_description_is_written_as_it_is_read(tmp_path: Path) -> None:
    path, again = tmp_path / "cluster.toml", tmp_path / "again.toml"
    path.write_text(GOOD.replace("two servers", 'two \\"servers\\"'))
    again.write_text(load_cluster(path).to_toml())
    assert load_cluster(again) == load_cluster(path)
    assert load_cluster(again).name == 'two "servers"'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD.replace("nodes = 2", "nodes = 0"), "nodes: Input should be greater"),
        (GOOD[: GOOD.index("[between]")], r"2 nodes need \[between\]"),
        (GOOD.replace("name", "nam"), r"name: Field required(.|\n)*nam: Extra inputs"),
        ("= 3", "cannot be read as TOML"),
    ],
)
def test_what_is_no_cluster_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(ClusterError, match=message):
        load_cluster(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"none.toml cannot be read"):
        load_cluster(tmp_path / "none.toml")
