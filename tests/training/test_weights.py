"""Weights on disk: a tied one is stored once and comes back as one."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, load_model

from twobw.models.sizes import GPT_SIZES
from twobw.models.whole import whole_model
from twobw.training.weights import load_weights, save_weights

TINY = GPT_SIZES["gpt-tiny"]
TIED = replace(TINY, tied=True)


@pytest.mark.parametrize("config", [TINY, TIED])
def test_what_was_saved_comes_back(config, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = whole_model(config)
    path = tmp_path / "weights"
    save_weights(model.state_dict(), config, path)
    loaded = load_weights(config, path)
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert (loaded[-1].logits.weight is loaded[0].token.weight) == config.tied


def test_a_tied_weight_is_stored_once(tmp_path: Path) -> None:
    state = whole_model(TIED).state_dict()
    state = {name: tensor.clone() for name, tensor in state.items()}  # as one stage gives them
    save_weights(state, TIED, tmp_path / "weights")
    assert set(state) - set(load_file(tmp_path / "weights")) == {"3.logits.weight"}


def test_safetensors_own_loader_reads_the_file(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model, other = whole_model(TIED), whole_model(TIED)
    save_weights(model.state_dict(), TIED, tmp_path / "weights")
    assert load_model(other, tmp_path / "weights") == (set(), [])
    torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_weights_of_a_tied_model_do_not_fit_one_that_is_not(tmp_path: Path) -> None:
    save_weights(whole_model(TIED).state_dict(), TIED, tmp_path / "weights")
    with pytest.raises(RuntimeError, match=r"Missing key.*3\.logits\.weight"):
        load_weights(TINY, tmp_path / "weights")
