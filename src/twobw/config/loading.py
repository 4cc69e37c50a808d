"""Reading the settings of a run: TOML, then overrides by dotted name, then every check.

Everything that can be checked without torch is checked here, before any process starts, and all
problems are reported at once.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from twobw.config.agreement import disagreements
from twobw.config.settings import Config, Section, nearest
from twobw.config.surroundings import nearest_path, not_at_hand
from twobw.config.toml_text import toml_text


class ConfigError(ValueError):
    """A config that cannot be run.

    Attributes:
        problems: one line a problem, each with the setting, its value and what is allowed.
    """

    def __init__(self, source: str, problems: list[str]) -> None:
        self.problems = tuple(problems)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n  ".join([f"{source}: {count}", *problems]))


_SECTIONS: dict[str, type[Section]] = {
    name: field.annotation  # type: ignore[misc]
    for name, field in Config.model_fields.items()
}
SETTINGS: tuple[str, ...] = tuple(
    f"{section}.{key}" for section, cls in _SECTIONS.items() for key in cls.model_fields
)
"""The dotted name of every setting."""


def load_config(path: Path, overrides: Mapping[str, str] | None = None) -> Config:
    """Read a TOML file, then ``overrides`` by dotted name: ``{"training.seed": "3"}``.

    An override's value is TOML (``3``, ``[5, 5]``, ``"text"``) or else a plain string.

    Raises:
        ConfigError: the file cannot be read, or with every problem of the config at once.
    """
    data = _read_toml(path)
    problems = [
        problem
        for name, text in (overrides or {}).items()
        if (problem := _override(data, name, text))
    ]
    if isinstance(run := data.setdefault("run", {}), dict):
        run.setdefault("name", path.stem)
    config, more = _validate(data, frozenset(overrides or ()))
    problems += more
    if config is None or problems:
        raise ConfigError(str(path), problems)
    return config


def read_resolved_config(path: Path) -> Config:
    """Read what `write_resolved_config` wrote; the text it was trained on need not be there.

    Raises:
        ConfigError: the file is missing or is not a whole config.
    """
    config, problems = _validate(_read_toml(path), frozenset(), check_surroundings=False)
    if config is None:
        raise ConfigError(str(path), problems)
    return config


def write_resolved_config(config: Config, path: Path) -> None:
    """Write every setting as TOML, defaults included, so that the file alone repeats the run."""
    sections = config.model_dump()
    text = "\n".join(
        f"[{name}]\n" + "".join(f"{key} = {toml_text(value)}\n" for key, value in section.items())
        for name, section in sections.items()
    )
    path.write_text(text, encoding="utf-8")


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except FileNotFoundError:
        problem = f"no such file{nearest_path(path, '*.toml')}"
    except OSError as error:
        problem = f"cannot be read: {error.strerror}; a config is a TOML file"
    except UnicodeDecodeError as error:
        problem = f"byte {error.start} is not UTF-8; a config is a TOML file, which is UTF-8 text"
    except tomllib.TOMLDecodeError as error:
        problem = f"not valid TOML: {error}"
    raise ConfigError(str(path), [problem])


def _override(data: dict[str, Any], name: str, text: str) -> str | None:
    """Set one dotted name in ``data``; the problem if there is no such setting."""
    if name not in SETTINGS:
        return _unknown_setting(name, f"--{name}")
    section, key = name.split(".")
    table = data.setdefault(section, {})
    if isinstance(table, dict):  # else the section itself is reported
        table[key] = _parse_override(_SECTIONS[section].model_fields[key].annotation, text)
    return None


def _parse_override(kind: Any, text: str) -> object:
    """``text`` as TOML if that is what the setting takes, else as a plain string."""
    if kind is str:
        value = _toml_value(text)
        return value if isinstance(value, str) else text
    is_bare_list = get_origin(kind) is tuple and not text.lstrip().startswith("[")
    value = _toml_value(f"[{text}]" if is_bare_list else text)
    return text if value is None else value


def _toml_value(text: str) -> object | None:
    """The one TOML value that ``text`` is, or None."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return None
    return parsed["value"] if len(parsed) == 1 else None


def _unknown_setting(name: str, shown: str) -> str:
    """What is wrong with a name that is no setting, and the nearest that is."""
    section, _, key = name.rpartition(".")
    if name in _SECTIONS:
        return f"{shown} is a section, not a setting; it has {_keys(name)}"
    same_key = [setting for setting in SETTINGS if setting.split(".")[1] == key]
    if section in _SECTIONS:
        near = nearest(key, _SECTIONS[section].model_fields)
        guesses = same_key or [f"{section}.{key}" for key in near]
        allowed = f"[{section}] has {_keys(section)}"
    else:
        guesses = same_key or nearest(name.partition(".")[0], _SECTIONS)
        allowed = f"the sections are {', '.join(_SECTIONS)}"
    hint = f"did you mean {guesses[0]}? " if guesses else ""
    return f"{shown} is not a setting; {hint}{allowed}"


def _keys(section: str) -> str:
    return ", ".join(_SECTIONS[section].model_fields)


def _validate(
    data: Mapping[str, Any], overridden: frozenset[str], *, check_surroundings: bool = True
) -> tuple[Config | None, list[str]]:
    """Every problem of the tree, and the config if there is none."""
    problems = [_unknown_setting(name, name) for name in data if name not in _SECTIONS]
    sections: dict[str, Any] = {}
    for name, cls in _SECTIONS.items():
        try:
            sections[name] = cls.model_validate(data.get(name, {}))
        except ValidationError as error:
            problems += [_explain(name, detail, overridden) for detail in error.errors()]
    problems += disagreements(**sections)
    if check_surroundings:
        problems += not_at_hand(**sections)
    return (None if problems else Config(**sections)), problems


def _explain(section: str, detail: ErrorDetails, overridden: frozenset[str]) -> str:
    """One line for one of pydantic's errors."""
    loc, kind, value = detail["loc"], detail["type"], detail["input"]
    name = ".".join([section, *(str(part) for part in loc[:1])])
    shown = f"--{name}" if name in overridden else name
    if kind == "extra_forbidden":
        return _unknown_setting(name, shown)
    if kind == "missing" and len(loc) == 1:
        return f"{shown} is missing; set it in [{section}]"
    if kind == "missing":
        return f"{shown} = {toml_text(value)}: must have more items"
    if kind == "model_type":
        return f"{name} is {toml_text(value)}; it must be a section, [{name}], with {_keys(name)}"
    message = detail["msg"].removeprefix("Value error, ")
    if not loc:
        return f"[{section}] {message}"
    index = "".join(f"[{part}]" for part in loc[1:])
    return f"{shown}{index} = {toml_text(value)}: {_reworded(message)}"


def _reworded(message: str) -> str:
    """Pydantic's words in those of a config: a setting "must", and TOML has lists, not tuples."""
    message = re.sub(r"^(\w+) should", "must", message).replace(" after validation", "")
    message = message.replace("a valid tuple", "a list such as [1, 2]")
    message = message.replace("a valid boolean", "true or false")
    return message.replace("greater than or equal to", "at least")
