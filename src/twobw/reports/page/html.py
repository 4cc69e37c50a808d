"""From what a page shows to the page: one file, with its style, its scripts and its data inside."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping
from importlib.resources import files
from string import Template
from typing import Any

_SCRIPTS = ("elements.js", "charts.js", "plan.js", "timeline.js", "page.js")


def html_page(title: str, content: Mapping[str, Any]) -> str:
    """The page.

    All text of ``content`` is set by the script as text, never as markup; and the page's policy
    lets it run no other script, and fetch nothing.

    Args:
        title: of the page.
        content: finite numbers, texts, lists and mappings; ``page.js`` says which.

    Raises:
        ValueError: a number is not finite.
    """
    style, script = _asset("page.css"), "\n".join(map(_asset, _SCRIPTS))
    return Template(_asset("page.html")).substitute(
        title=html.escape(title),
        style=style,
        style_hash=_policy_hash(style),
        content=_script_json(content),
        script=script,
        script_hash=_policy_hash(script),
    )


def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


def _policy_hash(text: str) -> str:
    """Names the contents of an element in a Content-Security-Policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _script_json(value: Any) -> str:
    """JSON that may stand in a script element: nothing in it ends the element or opens a comment,
    and no line separator of JavaScript is bare."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
