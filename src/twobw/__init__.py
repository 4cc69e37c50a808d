"""Pipeline parallelism for PyTorch that never drains (PipeDream-2BW)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twobw.runtime.pipeline import Pipeline

__all__ = ["Pipeline", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import `Pipeline`, and with it torch, only when it is asked for."""
    if name == "Pipeline":
        from twobw.runtime.pipeline import Pipeline

        return Pipeline
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
