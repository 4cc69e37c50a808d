from pathlib import Path

import pytest

from twobw.training.run_folder import create_run_folder, replacing, write_json


def test_a_folder_that_exists_is_never_used_again(tmp_path: Path) -> None:
    names = [create_run_folder(tmp_path / "runs", "demo").name for _ in range(3)]
    assert names == ["demo", "demo-2", "demo-3"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_text("old")

    def write() -> None:
        with replacing(path) as temporary:
            temporary.write_text("ne")
            raise KeyError

    with pytest.raises(KeyError):
        write()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_written_files_have_the_mode_that_others_have(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("")
    write_json(tmp_path / "value.json", {"a": 1})
    assert (tmp_path / "value.json").read_text() == '{\n  "a": 1\n}\n'
    assert (tmp_path / "value.json").stat().st_mode == plain.stat().st_mode
