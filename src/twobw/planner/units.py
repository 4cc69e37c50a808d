"""Bytes for people to read."""

from __future__ import annotations

_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_SHOWN = 0.1  # of a unit; less would show no digit


def unit_of(num_bytes: float) -> tuple[float, str]:
    """The unit in which ``num_bytes`` and what is like it are read best: its size and name."""
    return next((unit for unit in _UNITS if num_bytes >= _SHOWN * unit[0]), _UNITS[-1])


def of_limit(needed_bytes: float, limit_bytes: float, between: str = "of") -> str:
    """``19.2 GB of 16.0``."""
    size, name = unit_of(max(needed_bytes, limit_bytes))
    return f"{needed_bytes / size:.1f} {name} {between} {limit_bytes / size:.1f}"
