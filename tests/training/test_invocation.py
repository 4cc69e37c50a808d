import sys
from pathlib import Path

import pytest

from twobw.training.invocation import invocation


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder ``my env`` in the current one, with programs that are not on the path."""
    folder = tmp_path / "my env"
    folder.mkdir()
    for name in ("twobw", "python"):
        (folder / name).touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    return folder


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("my env/twobw", "'my env/twobw'"),
        ("/usr/lib/twobw/__main__.py", "'{environment}/python' -m twobw"),
    ],
)
def test_what_the_shell_would_not_find_is_shown_with_its_path(
    environment: Path, monkeypatch: pytest.MonkeyPatch, typed: str, shown: str
) -> None:
    monkeypatch.setattr(sys, "argv", [typed, "train"])
    assert invocation() == shown.format(environment=environment)


def test_what_the_shell_finds_is_shown_by_name(
    environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(environment))
    monkeypatch.setattr(sys, "argv", [str(environment / "twobw")])
    assert invocation() == "twobw"
    monkeypatch.setattr(sys, "argv", ["/usr/lib/twobw/__main__.py"])
    assert invocation() == "python -m twobw"
