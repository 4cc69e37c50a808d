"""``twobw profile``: what is refused before anything runs, and what is left behind."""

import pytest

from tests.profiler.support import DEMO
from twobw import cli
from twobw.profiler.command import parse_sizes
from twobw.profiler.profile import load_profile


def refusal(capsys, *arguments: str) -> str:
    """What the command says when it refuses, quickly and without a trace."""
    with pytest.raises(SystemExit) as exited:
        cli.main(["profile", str(DEMO), *arguments])
    assert exited.value.code == 2
    captured = capsys.readouterr()
    assert not captured.out
    return captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--microbatch-sizes", "1,0"], "microbatch size '0' is not a whole number"),
        (["--microbatch-sizes", "two"], "microbatch size 'two' is not a whole number"),
        (["--device", "v100"], "device 'v100' is not one of v100-16gb"),
        (
            ["--device", "v100-16gb", "--training.precision", "bf16"],
            "v100-16gb has no rate for bf16",
        ),
        (["--model.nam", "gpt-tiny"], "--model.nam is not a setting; did you mean model.name?"),
    ],
)
def test_refused_before_anything_runs(capsys, monkeypatch, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert message in refusal(capsys, *arguments)
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_is_refused(capsys, tmp_path):
    (tmp_path / "file").touch()
    words = refusal(capsys, "--out", str(tmp_path / "file" / "profile.json"))
    assert str(tmp_path / "file") in words
    assert f"{tmp_path} is a folder" in refusal(capsys, "--out", str(tmp_path))


def test_sizes_ascend_each_once():
    assert parse_sizes("4, 1,2,1") == [1, 2, 4]


def test_a_profile_without_hardware(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    arguments = ["--device", "a100-80gb", "--microbatch-sizes", "1,2", "--model.name", "gpt-tiny"]
    with pytest.raises(SystemExit) as exited:
        cli.main(["profile", str(DEMO), *arguments])
    assert not exited.value.code
    profile = load_profile(tmp_path / "runs" / "demo.profile.json")
    assert profile.model == "gpt-tiny"
    assert profile.device == "a100-80gb"
    assert profile.microbatch_sizes == (1, 2)
    text = capsys.readouterr().out
    assert "gpt-tiny, computed for a100-80gb: fp32, adamw" in text
    assert "±" not in text
    assert "the profile is in runs/demo.profile.json" in text
