"""Pipeline parallelism for PyTorch that never drains (PipeDream-2BW)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twobw.runtime.checkpoint.manifest import CheckpointError
    from twobw.runtime.checkpoint.writing import Keep
    from twobw.runtime.pipeline import Pipeline

__all__ = ["CheckpointError", "Keep", "Pipeline", "__version__"]
__version__ = "0.1.0"

_HOMES = {
    "CheckpointError": "twobw.runtime.checkpoint.manifest",
    "Keep": "twobw.runtime.checkpoint.writing",
    "Pipeline": "twobw.runtime.pipeline",
}


def __getattr__(name: str) -> Any:
    """Import what needs torch only when it is asked for."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
