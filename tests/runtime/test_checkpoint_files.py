"""Checkpoints on disk: what is whole, what is kept, what is refused."""

from __future__ import annotations

import errno
import json
import os
import pickle
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import twobw
from tests.runtime.test_checkpoint import make, plain_model, train, two_groups
from tests.runtime.test_features import adamw, build_data, momentum
from twobw.runtime.checkpoint import writing
from twobw.runtime.checkpoint.manifest import (
    CheckpointError,
    as_json,
    from_json,
    read_manifest,
    step_of,
)
from twobw.runtime.checkpoint.reading import checkpoints_in, newest_whole
from twobw.runtime.checkpoint.writing import Keep, Part, superfluous, write_part

DATA = build_data(num_batches=3)


def saved(folder: Path, num_batches: int = 2) -> None:
    """A checkpoint after each batch."""
    with make(plain_model(), optimizer=momentum) as pipeline:
        for pair in DATA[:num_batches]:
            pipeline.train_step(*pair)
            pipeline.save(folder)


def save_and_wait(pipeline: twobw.Pipeline, folder: Path) -> None:
    pipeline.save(folder)
    pipeline.wait_until_saved()


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_is_files_of_tensors_and_json(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    assert names_in(tmp_path) == ["step-00000001"]
    folder = tmp_path / "step-00000001"
    assert names_in(folder) == ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"]
    json.loads((folder / "manifest.json").read_text())
    tensors = {key for file in read_manifest(folder).files.values() for key in file.tensors}
    names = [name for name, _ in plain_model().named_parameters()]
    kinds = {"weights", "optimizer.momentum_buffer"}
    assert {f"{kind}/{name}" for kind in kinds for name in names} <= tensors


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("file", ["manifest.json", "rank-00001.safetensors"])
@pytest.mark.parametrize("damage", [shorten, flip_a_bit, Path.unlink])
def test_a_damaged_one_is_named_and_passed_over(
    tmp_path: Path, file: str, damage: Callable[[Path], None]
) -> None:
    saved(tmp_path)
    damage(tmp_path / "step-00000002" / file)
    found = newest_whole(tmp_path)
    assert found.folder.name == "step-00000001"
    assert str(tmp_path / "step-00000002" / file) in str(found.damaged[0])
    with make(plain_model(), optimizer=momentum) as pipeline:
        with pytest.warns(UserWarning, match="step-00000002.*step-00000001 is used"):
            manifest = pipeline.load(tmp_path)
        assert manifest.progress.batch == 1
    damage(tmp_path / "step-00000001" / file)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole: .*2.*1"):
        newest_whole(tmp_path)


def test_a_half_written_one_is_not_seen(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    left = tmp_path / ".step-00000002.abc"
    left.mkdir()
    (left / "rank-00000.safetensors").write_bytes(b"half")
    assert newest_whole(tmp_path).folder.name == "step-00000001"
    saved(tmp_path, 2)  # and goes when the next one is written
    assert names_in(tmp_path) == ["step-00000001", "step-00000002"]


def test_the_folder_may_be_the_checkpoint_itself(tmp_path: Path) -> None:
    saved(tmp_path)
    with make(plain_model(), optimizer=momentum) as pipeline:
        assert pipeline.load(tmp_path / "step-00000001").progress.batch == 1
        assert pipeline.load(tmp_path).progress.batch == 2


def test_without_any(tmp_path: Path) -> None:
    with (
        make(plain_model()) as pipeline,
        pytest.raises(CheckpointError, match="there is no checkpoint in"),
    ):
        pipeline.load(tmp_path / "nowhere")


class Planted:
    def __reduce__(self) -> Any:
        return os.mkdir, ("planted",)


@pytest.mark.parametrize("file", ["manifest.json", "rank-00000.safetensors", ".metadata"])
def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    monkeypatch.chdir(tmp_path)
    saved(tmp_path, 1)
    (tmp_path / "step-00000001" / file).write_bytes(pickle.dumps(Planted()))
    with make(plain_model(), optimizer=momentum) as pipeline:
        if file == ".metadata":
            pipeline.load(tmp_path)
        else:
            with pytest.raises(CheckpointError, match=file):
                pipeline.load(tmp_path)
    assert not Path("planted").exists()


def test_a_file_outside_the_folder_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    path = tmp_path / "step-00000001/manifest.json"
    outer = json.loads(path.read_text())
    content = outer["content"].replace("rank-00000.safetensors", "../elsewhere")
    digest = writing.encode.__globals__["_digest"](content)
    path.write_text(json.dumps({**outer, "content": content, "sha256": digest}))
    with pytest.raises(CheckpointError, match="not in its folder"):
        newest_whole(tmp_path)


def test_a_full_disk_is_warned_of_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file = writing.save_file

    def fail(tensors: object, path: Path) -> None:
        if path.name == "rank-00001.safetensors":
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save_file(tensors, path)

    with make(plain_model(), optimizer=momentum) as pipeline:
        losses = train(pipeline, DATA[:1])
        pipeline.save(tmp_path)
        pipeline.wait_until_saved()
        monkeypatch.setattr(writing, "save_file", fail)
        losses += train(pipeline, DATA[1:2])
        with pytest.warns(UserWarning, match="after batch 2: rank 1 .*No space left on device"):
            save_and_wait(pipeline, tmp_path)
        losses += train(pipeline, DATA[2:])
    assert names_in(tmp_path) == ["step-00000001"]
    assert newest_whole(tmp_path).manifest.progress.batch == 1
    with make(plain_model(), optimizer=momentum) as pipeline:
        assert train(pipeline, DATA) == losses


def test_a_rank_that_writes_nothing_is_waited_for_so_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 1)
    monkeypatch.setattr(
        writing, "_write_part_or_say_why", lambda folder, part: folder.mkdir(exist_ok=True)
    )
    with (
        make(plain_model(), timeout=0.2) as pipeline,
        pytest.warns(UserWarning, match=r"nothing from ranks \[0, 1\] within 0.2 s"),
    ):
        save_and_wait(pipeline, tmp_path)
    assert names_in(tmp_path) == ["step-00000001"]


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    with make(plain_model(), optimizer=momentum) as pipeline:
        pipeline.train_step(DATA[0][0] * float("inf"), DATA[0][1])
        with pytest.warns(UserWarning, match="weight is not finite"):
            save_and_wait(pipeline, tmp_path)
    assert names_in(tmp_path) == []


def test_training_goes_on_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written is what there was."""
    may_write = threading.Event()

    def late(folder: Path, part: Part) -> None:
        assert may_write.wait(60)
        write_part(folder, part)

    monkeypatch.setattr(writing, "write_part", late)
    with make(plain_model(), optimizer=momentum) as pipeline:
        train(pipeline, DATA[:1])
        pipeline.save(tmp_path)
        expected = pipeline.full_state_dict()
        train(pipeline, DATA[1:])
        assert checkpoints_in(tmp_path) == []
        may_write.set()
    with make(plain_model(), optimizer=momentum) as pipeline:
        pipeline.load(tmp_path)
        state = pipeline.full_state_dict()
        assert state is not None
        assert expected is not None
        assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("keep", "steps"),
    [
        (Keep(), [1, 2, 3, 4, 5, 6]),
        (Keep(last=2), [5, 6]),
        (Keep(last=1, every=2), [2, 4, 6]),
        (Keep(last=1, best=True), [3, 6]),
        (Keep(last=2, every=4, best=True), [3, 4, 5, 6]),
        (Keep(last=9), [1, 2, 3, 4, 5, 6]),
    ],
)
def test_those_that_are_not_to_be_kept_go(tmp_path: Path, keep: Keep, steps: list[int]) -> None:
    scores = [9.0, None, 2.0, 7.0, None, 3.0]
    with make(plain_model(), pp=1, schedule="1f1b", optimizer=momentum) as pipeline:
        for score in scores:
            pipeline.train_step(*DATA[0])
            pipeline.save(tmp_path, score=score)
        pipeline.wait_until_saved()
        gone = superfluous(tmp_path, keep)
        pipeline.save(tmp_path, score=3.0, keep=keep)  # once more after batch 6
    assert [step_of(path.name) for path in checkpoints_in(tmp_path)] == steps
    assert {step_of(path.name) for path in gone} == {1, 2, 3, 4, 5, 6} - {*steps}
    assert all(name.startswith("step-") for name in names_in(tmp_path))


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    model = plain_model()
    smaller, wider, other = (plain_model() for _ in range(3))
    del smaller[5]
    wider[0], other[0] = nn.Linear(7, 8), nn.Linear(6, 8, bias=False)
    for layers, options, message in (
        (smaller, {}, "is of a model of 6 layers; this one has 5"),
        (wider, {}, r"0.weight has the shape \[8, 7\] in the model and \[8, 6\] in"),
        (other, {}, "has weights of 0.bias, which the model has not"),
        (model, {"optimizer": adamw}, "has SGD for .*, not AdamW"),
        (model, {"lr_scheduler": lambda o: torch.optim.lr_scheduler.ConstantLR(o)}, "no state of"),
    ):
        with (
            make(layers, **{"optimizer": momentum, **options}) as pipeline,
            pytest.raises(CheckpointError, match=message),
        ):
            pipeline.load(tmp_path)


def test_groups_that_had_settings_of_their_own(tmp_path: Path) -> None:
    with make(plain_model(), optimizer=two_groups) as pipeline:
        train(pipeline, DATA[:1])
        pipeline.save(tmp_path)

    def one_group(named: list) -> list[torch.optim.Optimizer]:
        matrices = [pair for pair in named if pair[1].ndim == 2]
        rest = [pair for pair in named if pair[1].ndim != 2]
        return [torch.optim.Muon(matrices), torch.optim.AdamW(rest)]

    with (
        make(plain_model(), optimizer=one_group) as pipeline,
        pytest.raises(CheckpointError, match="are in one parameter group, but had settings"),
    ):
        pipeline.load(tmp_path)


def test_what_json_cannot_hold_is_refused(tmp_path: Path) -> None:
    with make(plain_model(), pp=1, schedule="1f1b") as pipeline:
        with pytest.raises(CheckpointError, match="the notes has a Generator"):
            pipeline.save(tmp_path, {"generator": torch.Generator()})
        pipeline.save(tmp_path, {"a": (1, 2.5, None, {3: "x"})})
    notes = newest_whole(tmp_path).manifest.notes
    assert notes == {"a": [1, 2.5, None, {3: "x"}]}
    counter = Counter({30: 1})
    assert from_json(json.loads(json.dumps(as_json(counter, ""))), Counter()) == counter
