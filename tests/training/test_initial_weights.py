"""Starting from another run's weights: what is taken over, and what is refused with which words."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import twobw
from tests.config.files import problem_of, write
from twobw.config import ConfigError, load_config
from twobw.models.bert import class_loss
from twobw.models.sizes import BertConfig, GPTConfig, bert_config, gpt_config
from twobw.models.whole import model_layers, whole_model
from twobw.runtime.layers import build_layers
from twobw.runtime.randomness import build_layer
from twobw.training.initial_weights import check_initial_weights, start_from
from twobw.training.weights import save_weights

MASKED = bert_config("bert-tiny", dropout=0.0)
CLASSES = bert_config("bert-tiny", dropout=0.0, num_classes=4)


def weights_of(folder: Path, config: BertConfig | GPTConfig = MASKED, seed: int = 1) -> Path:
    torch.manual_seed(seed)
    path = folder / "weights.safetensors"
    save_weights(whole_model(config).state_dict(), config, path)
    return path


def layers_of(config: BertConfig | GPTConfig) -> list[nn.Module | Callable[[], nn.Module]]:
    return model_layers(config, partial(build_layer, 0))


def started(config: BertConfig | GPTConfig, path: Path) -> nn.Sequential:
    return nn.Sequential(*build_layers(start_from(layers_of(config), str(path)), 0, seed=0))


def problems(folder: Path, path: Path, **model: object) -> tuple[str, ...]:
    values = {"name": "bert-tiny", "init_from": str(path)} | model
    config = load_config(write(folder, model=values))
    with pytest.raises(ConfigError) as caught:
        check_initial_weights(config)
    assert str(caught.value).startswith(f"model.init_from = {path}: ")
    return caught.value.problems


def test_all_but_the_head_is_taken_over_and_its_norm_too(tmp_path: Path) -> None:
    path = weights_of(tmp_path)
    torch.manual_seed(1)
    source = whole_model(MASKED).state_dict()
    fresh = nn.Sequential(*build_layers(layers_of(CLASSES), 0, seed=0)).state_dict()
    state = started(CLASSES, path).state_dict()
    assert set(state) - set(source) == {"3.classes.weight", "3.classes.bias"}
    for name, tensor in state.items():
        assert torch.equal(tensor, source.get(name, fresh[name])), name
    assert not torch.equal(state["0.token.weight"], fresh["0.token.weight"])


@pytest.mark.parametrize("config", [MASKED, bert_config("bert-tiny", tied=True)])
@pytest.mark.parametrize("wanted_tied", [False, True])
def test_the_same_model_is_taken_over_whole(
    tmp_path: Path, config: BertConfig, wanted_tied: bool
) -> None:
    path = weights_of(tmp_path, config)
    torch.manual_seed(1)
    source = whole_model(config).state_dict()
    wanted = bert_config("bert-tiny", tied=wanted_tied)
    model = started(wanted, path)
    tied = model[0].token.weight is model[-1].logits.weight
    assert tied is wanted_tied
    for name, tensor in model.state_dict().items():
        if not (wanted_tied and not config.tied and "token.weight" in name):
            assert torch.equal(tensor, source[name]), name


def test_a_gpt_may_start_from_a_gpt(tmp_path: Path) -> None:
    config = gpt_config("gpt-tiny")
    state = started(config, weights_of(tmp_path, config)).state_dict()
    torch.manual_seed(1)
    for name, tensor in whole_model(config).state_dict().items():
        assert torch.equal(tensor, state[name]), name


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.filterwarnings("ignore:2bw with")
def test_every_split_starts_from_the_same_weights(tmp_path: Path, pp: int) -> None:
    path = weights_of(tmp_path)
    layers = start_from(layers_of(CLASSES), str(path))
    with twobw.Pipeline(
        layers, class_loss, lambda named: torch.optim.SGD(named, lr=0.1), pp=pp, timeout=30
    ) as pipeline:
        state = pipeline.full_state_dict()
    assert state is not None
    torch.testing.assert_close(state, dict(started(CLASSES, path).state_dict()), rtol=0, atol=0)


def test_what_fits_passes(tmp_path: Path) -> None:
    path = weights_of(tmp_path)
    for model in ({"num_classes": 4}, {}, {"num_classes": 4, "tied": True}):
        values = {"name": "bert-tiny", "init_from": str(path)} | model
        check_initial_weights(load_config(write(tmp_path, model=values)))
    check_initial_weights(load_config(write(tmp_path)))  # nothing to start from


def test_another_depth_is_refused_with_the_right_one(tmp_path: Path) -> None:
    assert problems(tmp_path, weights_of(tmp_path), num_layers=5) == (
        "has 4 layers (embedding, 2 blocks, head), but the model has 7; set model.num_layers = 2",
    )


def test_other_shapes_are_refused(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, weights_of(tmp_path), sequence_length=64)
    assert problem == (
        "has weights of other shapes: 0.position.weight, [32, 32] there and [64, 32] in the model"
    )
    (problem,) = problems(tmp_path, weights_of(tmp_path), width=64)
    assert problem.endswith("more")
    classes = bert_config("bert-tiny", num_classes=3)
    (problem,) = problems(tmp_path, weights_of(tmp_path, classes), num_classes=4)
    assert "3.classes.weight, [3, 32] there and [4, 32] in the model" in problem


def test_another_family_is_refused(tmp_path: Path) -> None:
    found = problems(tmp_path, weights_of(tmp_path, gpt_config("gpt-tiny")))
    assert found[0] == "lacks weights of the model: 0.norm.weight; 0.norm.bias"
    found = problems(tmp_path, weights_of(tmp_path), name="gpt-tiny")
    assert found[0].startswith("has weights that the model has not: 0.norm.")


def test_what_is_no_file_of_weights_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_text("text")
    assert "cannot be read" in problems(tmp_path, path)[0]
    save_file({"model.weight": torch.zeros(2)}, path)
    assert problems(tmp_path, path) == ("is not a file of weights that twobw train has written",)


def test_a_file_that_is_not_there_is_refused_with_the_nearest(tmp_path: Path) -> None:
    weights_of(tmp_path)
    path = write(tmp_path, model={"init_from": str(tmp_path / "wieghts.safetensors")})
    problem = problem_of(path)
    assert problem.startswith("model.init_from = ")
    assert "no such file; did you mean" in problem
    assert "is a folder; give a file" in problem_of(path, {"model.init_from": str(tmp_path)})
