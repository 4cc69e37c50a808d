"""How torch's launcher is told to start the ranks."""

from pathlib import Path

import pytest
from torch.distributed.launcher.api import LaunchConfig

from tests.config.files import write
from twobw.config import load_config
from twobw.training import launch as launch_module
from twobw.training.launch import launch
from twobw.training.run_folder import write_json


def test_after_ctrl_c_ranks_may_take_as_long_as_their_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"):
        monkeypatch.setenv(name, "")  # put back at the end
    seen: list[LaunchConfig] = []

    class FakeLauncher:
        def __init__(self, config: LaunchConfig, entrypoint: str) -> None:
            seen.append(config)

        def __call__(self, *arguments: str) -> None:
            write_json(Path("runs/first/summary.json"), {"failure": None})

    monkeypatch.setattr(launch_module, "elastic_launch", FakeLauncher)
    monkeypatch.setattr("logging.disable", lambda level: None)
    config = load_config(write(tmp_path, parallel={"dp": 2}, training={"timeout_s": 600.0}))
    assert launch(config) == 0
    assert (seen[0].nproc_per_node, seen[0].shutdown_timeout) == (4, 660)
