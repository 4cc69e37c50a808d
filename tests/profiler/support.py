"""What tests of the profiler share."""

from pathlib import Path

from twobw.config import Config, load_config

DEMO = Path(__file__).parents[2] / "configs/demo.toml"


def config(**settings: str) -> Config:
    """The demo's config, changed: ``model__name="gpt-tiny"``."""
    return load_config(DEMO, {name.replace("__", "."): text for name, text in settings.items()})
