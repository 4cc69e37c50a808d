"""Config files for tests, and what is said of them."""

from pathlib import Path

import pytest

from twobw.config import ConfigError, load_config

BASE: dict[str, dict[str, object]] = {
    "model": {"name": "gpt-tiny"},
    "optimizer": {"lr": 0.01},
    "training": {"num_batches": 5, "global_batch_size": 8},
}


def toml(value: object) -> str:
    """Independent of the product's writer; enough for what the tests write."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    return f"'{value}'" if isinstance(value, str) else repr(value)


def write(folder: Path, name: str = "first.toml", **changes: dict[str, object]) -> Path:
    path = folder / name
    sections = {key: BASE.get(key, {}) | changes.get(key, {}) for key in [*BASE, *changes]}
    lines = [
        line
        for section, settings in sections.items()
        for line in [f"[{section}]", *(f"{key} = {toml(v)}" for key, v in settings.items())]
    ]
    path.write_text("\n".join(lines))
    return path


def problems_of(path: Path, overrides: dict[str, str] | None = None) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return caught.value.problems


def problem_of(path: Path, overrides: dict[str, str] | None = None) -> str:
    problems = problems_of(path, overrides)
    assert len(problems) == 1, problems
    return problems[0]
