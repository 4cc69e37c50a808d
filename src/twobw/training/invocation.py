"""How the user called this program, for the commands that it prints."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path


def invocation() -> str:
    """What a shell in the same folder runs this program by: ``twobw`` where it finds that, else
    the path or the ``python -m twobw`` that was typed."""
    program = sys.argv[0]
    if Path(program).name == "__main__.py":
        return f"{_as_found(sys.executable)} -m twobw"
    return _as_found(program)


def _as_found(program: str) -> str:
    """The program's bare name if the shell finds this very file by it, else its path; quoted."""
    name = Path(program).name
    found = shutil.which(name)
    is_same = found is not None and Path(found).absolute() == Path(program).absolute()
    return shlex.quote(name if is_same else program)
