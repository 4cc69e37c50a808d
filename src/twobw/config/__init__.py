"""The settings of a run, checked before any process starts."""

from twobw.config.loading import (
    SETTINGS,
    ConfigError,
    load_config,
    read_resolved_config,
    write_resolved_config,
)
from twobw.config.settings import (
    CheckpointSettings,
    Config,
    DataSettings,
    ModelSettings,
    OptimizerSettings,
    ParallelSettings,
    RunSettings,
    TrainingSettings,
)

__all__ = [
    "SETTINGS",
    "CheckpointSettings",
    "Config",
    "ConfigError",
    "DataSettings",
    "ModelSettings",
    "OptimizerSettings",
    "ParallelSettings",
    "RunSettings",
    "TrainingSettings",
    "load_config",
    "read_resolved_config",
    "write_resolved_config",
]
