"""The command line: parse, call, print. Torch is loaded only by the commands that compute."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from twobw.config import ConfigError, load_config

app = App(
    name="twobw",
    help="Pipeline-parallel training of PyTorch models that never drains (PipeDream-2BW).",
    version=lambda: version("twobw"),
)


@app.command
def train(
    config: Path,
    /,
    *settings: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
) -> int:
    """Train a model as a TOML file says.

    Starts the ranks on this machine, or is one of them under torchrun. Any setting of the file can
    be given here too: --section.key value. Ctrl-C finishes the batch, saves the weights and exits.

    Parameters
    ----------
    config
        The TOML file.
    """
    checked = load_config(config, parse_settings(settings))
    from twobw.training.worker import has_outer_launcher, run_rank

    if has_outer_launcher():
        return run_rank(checked)
    from twobw.training.launch import launch

    return launch(checked)


def parse_settings(tokens: Sequence[str]) -> dict[str, str]:
    """``--section.key value`` and ``--section.key=value`` by dotted name; the last one counts.

    Raises:
        ConfigError: a token that is neither a name nor a name's value.
    """
    settings: dict[str, str] = {}
    left = list(tokens)
    while left:
        token = left.pop(0)
        name, equals, value = token.removeprefix("--").partition("=")
        if not token.startswith("--"):
            raise ConfigError("command line", [f"{token!r} is not of the form --section.key value"])
        if not equals:
            if not left or left[0].startswith("--"):
                raise ConfigError("command line", [f"{token} has no value; write {token} VALUE"])
            value = left.pop(0)
        settings[name] = value
    return settings


def main() -> None:
    """The ``twobw`` command. What the user can put right is one message and exit code 2."""
    try:
        app()
    except (ValueError, OSError) as error:
        sys.stderr.write(f"twobw: {error}\n")
        sys.exit(2)
