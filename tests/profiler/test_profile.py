"""A profile as data: JSON there and back, refusals, what layers keep together."""

import json
from typing import Any

import pytest

from twobw.profiler.profile import (
    SCHEMA_VERSION,
    LayerProfile,
    LinkProfile,
    MicrobatchProfile,
    ModelProfile,
    OverheadProfile,
    ProfileError,
    TieProfile,
    load_profile,
)


def microbatch(size: int = 1, **changes: int) -> MicrobatchProfile:
    values = {
        "forward_ns": 10,
        "backward_ns": 20,
        "recompute_ns": 10,
        "input_bytes": 8,
        "output_bytes": 8,
        "stash_bytes": 100,
        "kept_input_bytes": 0,
        "kept_output_bytes": 0,
        "forward_peak_bytes": 120,
        "backward_peak_bytes": 130,
    }
    return MicrobatchProfile(microbatch_size=size, **(values | changes))


def layer(name: str = "Block", **changes: int) -> LayerProfile:
    return LayerProfile(name=name, num_parameters=3, microbatches=(microbatch(**changes),))


def model(**changes: Any) -> ModelProfile:
    values: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "kind": "measured",
        "model": "gpt-tiny",
        "device": "a CPU",
        "num_threads": 1,
        "precision": "fp32",
        "optimizer": "adamw",
        "entries": (layer("Embedding"), layer()),
        "layers": (0, 1, 1),
        "loss": layer("loss"),
        "ties": (TieProfile(layers=(0, 2), num_parameters=3),),
        "overhead": OverheadProfile(op_ns=5),
        "link": LinkProfile(latency_ns=100, bytes_per_second=10**9),
    }
    return ModelProfile(**(values | changes))


def test_json_gives_the_same_profile_back(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(model().to_json())
    assert load_profile(path) == model()


def test_equal_layers_are_one_object():
    profile = model()
    assert profile.layer(1) is profile.layer(2)
    assert profile.layer(0).name == "Embedding"
    assert profile.num_layers == 3


def changed(path: list[str | int], value: object) -> str:
    """The profile's JSON with one value changed; ``...`` takes it away."""
    data = json.loads(model().to_json())
    place = data
    for part in path[:-1]:
        place = place[part]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["schema_version"], 2, "its schema_version is not 1, .*profile again"),
        (["schema_version"], ..., "its schema_version is not 1"),
        (["precision"], ..., "precision: Field required"),
        (["entries", 0, "microbatches", 0, "forward_ns"], ..., r"forward_ns: Field required"),
        (
            ["entries", 0, "microbatches", 0, "forward_ns"],
            -1,
            r"entries\.0\.microbatches\.0\.forward_ns: .*greater than or equal to 0",
        ),
        (["entries", 0, "microbatches", 0, "stash_bytes"], 1.5, "stash_bytes: .*integer"),
        (["entries", 0, "microbatches", 0, "stash_bytes"], "8", "stash_bytes: .*integer"),
        (["colour"], "red", "colour: Extra inputs"),
        (["layers"], [0, 1, 2], r"layers name the entries \[0, 1, 2\], of which there are 2"),
        (["layers"], [1, 1], r"layers name the entries \[1\], of which there are 2"),
        (["ties", 0, "layers"], [0, 3], r"a tie of the layers \(0, 3\) out of 3"),
        (["loss", "microbatches", 0, "microbatch_size"], 2, r"microbatches of \(1,\), the loss"),
        (["slowdown"], 0, "slowdown: .*greater than 0"),
        (["link", "bytes_per_second"], 0, "bytes_per_second: .*greater than or equal to 1"),
    ],
)
def test_a_faulty_file_is_refused(path, value, message):
    with pytest.raises(ProfileError, match=message):
        ModelProfile.from_json(changed(path, value))


def test_every_problem_is_told_at_once():
    data = json.loads(changed(["precision"], ...))
    del data["device"]
    with pytest.raises(ProfileError, match=r"(?s)device: .*precision: "):
        ModelProfile.from_json(json.dumps(data))


def test_what_is_no_json_is_refused(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text("{")
    with pytest.raises(ProfileError, match=r"profile\.json is no profile"):
        load_profile(path)


def test_microbatch_sizes_ascend():
    with pytest.raises(ValueError, match=r"\[2, 1\] do not ascend"):
        LayerProfile(name="x", microbatches=(microbatch(2), microbatch(1)))


def test_a_size_that_was_not_profiled_is_named():
    with pytest.raises(ValueError, match="no profile for microbatches of 3; there is 1"):
        layer().at(3)


def test_what_is_handed_over_is_kept_once():
    # as ReLU -> Linear: one keeps its output, the other its input, which are one tensor
    relu = layer("ReLU", stash_bytes=0, kept_output_bytes=8)
    linear = layer("Linear", stash_bytes=0, kept_input_bytes=8)
    loss = layer("loss", stash_bytes=50)
    profile = model(entries=(relu, linear), layers=(0, 1, 0, 1), loss=loss, ties=())
    assert profile.stash_bytes(0, 2, 1) == 8
    assert profile.stash_bytes(1, 3, 1) == 8 + 8
    assert profile.stash_bytes(1, 2, 1) == 8
    assert profile.stash_bytes(0, 4, 1) == 8 + 8 + 50
