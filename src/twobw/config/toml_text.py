"""Values as TOML: the standard library only reads it."""

from __future__ import annotations

import json


def toml_text(value: object) -> str:
    """A value as TOML; what has no short form there (a table, a date) as Python shows it."""
    match value:
        case bool():
            return str(value).lower()
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list() | tuple():
            return f"[{', '.join(toml_text(item) for item in value)}]"
        case _:
            return repr(value)
