import pytest

from twobw.planner.units import of_limit, unit_of


@pytest.mark.parametrize(
    ("num_bytes", "unit"),
    [(19.2e9, "GB"), (1e8, "GB"), (9.9e7, "MB"), (1e5, "MB"), (9e4, "kB"), (0, "kB")],
)
def test_a_unit_shows_a_digit(num_bytes: float, unit: str) -> None:
    assert unit_of(num_bytes)[1] == unit


def test_both_have_the_unit_of_the_larger() -> None:
    assert of_limit(19.2e9, 16e9) == "19.2 GB of 16.0"
    assert of_limit(4e6, 40e6) == "4.0 MB of 40.0"
    assert of_limit(2e9, 1e9, "instead of") == "2.0 GB instead of 1.0"
