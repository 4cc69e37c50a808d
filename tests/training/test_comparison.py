"""A run beside what was predicted of it."""

import re
from pathlib import Path

import pytest

from tests.planner.support import layer, profile
from tests.reports.pages import a_plan, make_run
from twobw.cli import main
from twobw.config import load_config, write_resolved_config
from twobw.profiler.profile import LinkProfile
from twobw.training.comparison import plan_of_run, run_compare_command
from twobw.training.run_folder import CONFIG, TIMELINE
from twobw.training.run_reading import load_run


def rows_of(text: str, word: str) -> list[list[str]]:
    """The cells of the lines that begin with a word, that left out."""
    return [
        re.split(r"\s{2,}", line.removeprefix(word).strip())
        for line in text.splitlines()
        if line.startswith(word)
    ]


def test_a_run_beside_its_plan(tmp_path: Path) -> None:
    """Predicted: 2 x (4 + 8) + 1 ms; measured: 2 x (5 + 10) + 1 ms."""
    text = run_compare_command(make_run(tmp_path / "demo", a_plan()))
    assert rows_of(text, "time of a batch, ms") == [["25.00", "31.00", "0.806"]]
    assert rows_of(text, "samples a second") == [["80.0", "64.5", "1.240"]]
    assert [row[:2] for row in rows_of(text, "1 ")] == [
        ["predicted", "100.0%"],
        ["measured", "100.0%"],
    ]
    assert [row[-1] for row in rows_of(text, "0 ")][1] == "0.050"
    assert rows_of(text, "work") == [["25.00", "31.00", "100.0%"]]


def test_a_run_without_a_plan_needs_a_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["compare", str(make_run(tmp_path / "demo"))])
    assert ended.value.code == 2
    assert "was not started from a plan. Give --profile" in capsys.readouterr().err


def test_a_run_that_was_killed_has_nothing_to_compare(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "demo", a_plan())
    (folder / TIMELINE).unlink()
    with pytest.raises(ValueError, match="the run has not ended, or was killed"):
        run_compare_command(folder)


def test_a_plan_that_is_not_the_runs_is_not_compared(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "demo", a_plan())
    text = (folder / CONFIG).read_text()
    (folder / CONFIG).write_text(text.replace("num_microbatches = 2", "num_microbatches = 4"))
    with pytest.raises(ValueError, match="num_microbatches is 4, not 2; give --profile"):
        run_compare_command(folder)


class TestFromAProfile:
    LINK = LinkProfile(latency_ns=0, bytes_per_second=1e12)
    ENTRY = layer(forward_ns=10**6, backward_ns=2 * 10**6, update_ns=250_000, sizes=(1, 2))

    def run_folder(self, tmp_path: Path, **settings: str) -> Path:
        folder = make_run(tmp_path / "demo")
        (tmp_path / "c.toml").write_text("""
[model]
name = "gpt-demo"
[parallel]
schedule = "2bw"
num_microbatches = 2
[optimizer]
lr = 0.1
[training]
num_batches = 10
global_batch_size = 2
""")
        config = load_config(tmp_path / "c.toml", settings)
        write_resolved_config(config, folder / CONFIG)
        return folder

    def profile_file(self, tmp_path: Path, **more: object) -> Path:
        made = profile([self.ENTRY], [0] * 8, model="gpt-demo", link=self.LINK, **more)
        path = tmp_path / "profile.json"
        path.write_text(made.to_json())
        return path

    def test_the_runs_own_layout_is_predicted(self, tmp_path: Path) -> None:
        folder = self.run_folder(tmp_path)
        text = run_compare_command(folder, self.profile_file(tmp_path))
        assert rows_of(text, "time of a batch, ms") == [["25.00", "31.00", "0.806"]]

    def test_another_model_or_size_is_refused(self, tmp_path: Path) -> None:
        folder = self.run_folder(tmp_path)
        with pytest.raises(ValueError, match="the profile is of gpt-demo, bf16, adamw; the run is"):
            run_compare_command(folder, self.profile_file(tmp_path, precision="bf16"))
        folder = self.run_folder(tmp_path / "more", **{"training.global_batch_size": "8"})
        with pytest.raises(ValueError, match=r"8 / 2 samples; profiled were 1, 2"):
            run_compare_command(folder, self.profile_file(tmp_path))

    def test_the_split_is_the_runs(self, tmp_path: Path) -> None:
        folder = self.run_folder(tmp_path)
        run = load_run(folder)
        made = profile(
            [self.ENTRY],
            [0] * 8,
            model="gpt-demo",
            link=LinkProfile(latency_ns=0, bytes_per_second=1e12),
        )
        config = load_config(tmp_path / "c.toml")
        assert plan_of_run(run, config, made).split == run.split == (4, 4)
