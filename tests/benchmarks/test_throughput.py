"""The command line of the throughput benchmark."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks/throughput.py"


def test_a_contestant_that_there_is_not_is_refused_with_the_nearest(tmp_path: Path) -> None:
    arguments = ["--contestants", "twobw 2bw,torch 1FB1"]
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments, "--json", str(tmp_path / "out.json")],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.splitlines()[-1] == (
        "throughput.py: error: argument --contestants: 'torch 1FB1' is none of 2bw, 1f1b, gpipe, "
        "torch 1F1B, torch GPipe, DeepSpeed, ideal; did you mean 'torch 1F1B'?"
    )
    assert not (tmp_path / "out.json").exists()
