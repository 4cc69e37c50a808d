"""A real browser without a window: the Chromium inside the wheel of kaleido 0.2.1, which brings all
libraries it needs. Its program calls one function of a script that it finds in its working folder,
here `browser.js`, and prints what the function's promise gives."""

import importlib.util
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-breakpad", "--disable-dev-shm-usage"),
    "--allow-file-access-from-files",  # so that the script may look into the page
)


def find_browser() -> Path | None:
    """The browser's folder, if kaleido of this kind is installed."""
    spec = importlib.util.find_spec("kaleido")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "executable"
    return folder if (folder / "bin" / "kaleido").is_file() else None


def visit(browser: Path, page: Path, script: str) -> Any:
    """Open a page from disk, run the body of a function of its ``window`` and give what it returns;
    and what the page complained of, and what it asked for over the network.

    Raises:
        AssertionError: the browser failed, or the script did.
    """
    request = {"page": page.resolve().as_uri(), "script": script}
    environment = os.environ | {
        "LD_LIBRARY_PATH": str(browser / "lib"),
        "FONTCONFIG_PATH": str(browser / "etc" / "fonts"),
    }
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "js").mkdir()
        driver = Path(__file__).with_name("browser.js")
        shutil.copyfile(driver, Path(folder, "js", "kaleido_scopes.js"))
        ended = subprocess.run(
            [str(browser / "bin" / "kaleido"), "plotly", *FLAGS],
            input=json.dumps(request) + "\n",
            cwd=folder,
            env=environment | {"XDG_DATA_HOME": folder},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    lines = ended.stdout.splitlines()
    assert len(lines) == 2, f"the browser gave {lines} and {ended.stderr[-1000:]}"
    answer = json.loads(lines[1])
    assert answer["code"] == 0, answer["message"]
    return answer["result"]


def complaints(answer: dict[str, Any]) -> Sequence[str]:
    """What a page must be free of: errors, what its policy forbade, requests."""
    return [*answer["told"], *answer["requests"]]
