"""Weights of a model in a safetensors file.

The format knows no tensors that share memory: of a tied weight only its first name is stored, and
the file's metadata gives the others, as ``safetensors.torch.save_model`` does it, whose counterpart
``load_model`` reads these files, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from twobw.models.sizes import BertConfig, GPTConfig
from twobw.models.whole import model_with, tied_names
from twobw.training.run_folder import replacing


def save_weights(weights: Mapping[str, Tensor], config: GPTConfig | BertConfig, path: Path) -> None:
    """Write the whole model's weights in one step (see ``replacing``)."""
    aliases = tied_names(config)
    stored = {name: tensor for name, tensor in weights.items() if name not in aliases}
    with replacing(path) as temporary:
        save_file(stored, temporary, metadata=aliases or None)


def load_weights(config: GPTConfig | BertConfig, path: Path) -> nn.Sequential:
    """The model of a size with the weights of a file that `save_weights` wrote.

    Raises:
        OSError, SafetensorError: the file cannot be read.
        RuntimeError: its names or shapes do not fit.
    """
    return model_with(config, load_file(path))
