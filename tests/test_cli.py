import re
import subprocess
import sys
from pathlib import Path

import pytest

from twobw import __version__
from twobw.cli import main, parse_settings
from twobw.config import ConfigError, load_config
from twobw.training.worker import run_rank

CONFIG = """
[model]
name = "gpt-tiny"
[optimizer]
lr = 1e-3
[training]
num_batches = 2
global_batch_size = 8
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return path


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    code = ended.value.code
    assert isinstance(code, int)
    return code


def test_settings_by_name_the_last_one_counts() -> None:
    tokens = ["--parallel.split", "[5, 5]", "--training.seed=3", "--training.seed", "-4"]
    assert parse_settings(tokens) == {"parallel.split": "[5, 5]", "training.seed": "-4"}


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["seed", "3"], "'seed' is not of the form --section.key value"),
        (["--training.seed"], "--training.seed has no value"),
        (["--training.seed", "--run.name", "x"], "--training.seed has no value"),
    ],
)
def test_tokens_that_are_no_settings(tokens: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_settings(tokens)


@pytest.mark.parametrize(
    ("setting", "value", "hint"),
    [
        ("--parallel.scedule", "1f1b", "parallel.schedule"),
        ("--parallel.schedule", "1f1bb", "did you mean 1f1b"),
        ("--parallel.pp", "9", "pp"),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_starts(
    config: Path,
    capsys: pytest.CaptureFixture[str],
    setting: str,
    value: str,
    hint: str,
) -> None:
    assert run("train", str(config), setting, value) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert hint in printed.err
    assert "Traceback" not in printed.err
    assert [path.name for path in config.parent.iterdir()] == [config.name]


def test_a_config_that_is_not_there(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", "tiny.tml") == 2
    assert "did you mean tiny.toml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("paths", "settings", "message"),
    [
        ("empty.txt", [], "empty.txt: 0 bytes of text in 1 file"),
        ("short.txt", [], "short.txt: 600 bytes of text in 1 file .* give 660 bytes"),
        ("empty", [], "empty: no text in this folder: 0 files"),
        ("binary", [], "binary: no text in this folder: 1 file,"),
        ("none.txt", [], "no such file or folder"),
        ("locked.txt", [], "locked.txt cannot be read: Permission denied"),
        (
            "enough.txt",
            ["--parallel.dp", "2", "--data.validation_fraction", "0.05"],
            "the validation text has 1 samples, fewer than parallel.dp = 2",
        ),
    ],
)
def test_text_that_will_not_do_is_refused_before_anything_starts(
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    paths: str,
    settings: list[str],
    message: str,
) -> None:
    read_bytes = Path.read_bytes

    def read(path: Path) -> bytes:
        if path.name == "locked.txt":
            raise PermissionError(13, "Permission denied")  # as root, no real file gives it
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", read)
    monkeypatch.setattr("twobw.cli.die_on", lambda signals: None)  # Ctrl-C stays pytest's
    for name, size in (
        ("empty.txt", 0),
        ("short.txt", 600),
        ("enough.txt", 700),
        ("locked.txt", 700),
    ):
        Path(name).write_bytes(b"x" * size)
    Path("empty").mkdir()
    Path("binary").mkdir()
    Path("binary/file").write_bytes(b"\0" * 700)
    before = sorted(config.parent.iterdir())
    assert run("train", str(config), "--data.paths", paths, *settings) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.search(message, printed.err)
    assert "Traceback" not in printed.err
    assert sorted(config.parent.iterdir()) == before


def test_another_number_of_ranks_than_the_config_has(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"WORLD_SIZE is 4.*--parallel.pp 4"):
        run_rank(load_config(config))


def test_a_folder_that_is_no_run(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("sample", str(config.parent / "runs")) == 2
    assert "is not a run" in capsys.readouterr().err


def test_a_schedule_is_printed_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--stages", "2", "--microbatches", "2", "--batches", "1"]
    assert run("schedule", "gpipe", *sizes, "--format", "csv") == 0
    assert capsys.readouterr().out == "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"
    assert run("schedule", "gpipe", *sizes) == 0
    assert "legal" in capsys.readouterr().out
    assert run("schedule", "gpip", *sizes) == 2
    assert "gpipe" in capsys.readouterr().err
    path = tmp_path / "wrong.csv"
    path.write_text("0F0,0B0\n1B0,1F0\n")
    assert run("schedule", "--check", str(path)) == 1
    assert "illegal" in capsys.readouterr().out


@pytest.mark.parametrize("value", ["2.5", "2.0", "x", "1e1", ""])
@pytest.mark.parametrize(
    "command",
    [
        ["schedule", "2bw", "--stages"],
        ["schedule", "2bw", "--microbatches"],
        ["schedule", "2bw", "--batches"],
        ["schedule", "2bw", "--extra-in-flight"],
        ["schedule", "2bw-fresh", "--update-lag"],
        ["sample", "runs/demo", "--tokens"],
        ["sample", "runs/demo", "--top-k"],
        ["sample", "runs/demo", "--seed"],
    ],
)
def test_what_is_not_a_whole_number_is_refused(
    command: list[str], value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*command, value) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"Invalid value for {command[-1]}: {value!r} is not a whole number" in printed.err


def test_help_names_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", "--help") == 0
    assert "parallel.schedule" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out.strip() == __version__


def test_the_command_line_starts_without_torch() -> None:
    code = """
import sys
from twobw.cli import app
app("schedule 2bw --stages 2 --microbatches 2 --batches 2", result_action="return_value")
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
