"""Weights out of a run, for other tools, and into one."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save

from twobw.config import load_config, read_resolved_config
from twobw.models.sizes import BertConfig, GPTConfig
from twobw.models.whole import shapes_of, tied_names
from twobw.runtime.checkpoint.reading import Stored, newest_whole
from twobw.training.initial_weights import check_initial_weights
from twobw.training.resuming import config_to_resume, open_run
from twobw.training.run_folder import CHECKPOINTS, SUMMARY, WEIGHTS, write_config, write_json
from twobw.training.weights import save_weights

Format = Literal["safetensors", "dcp"]
_EXPORT = "export"
_INITIAL = "initial.safetensors"


def export_run(folder: Path, file_format: Format, out: Path | None) -> Path:
    """Write a run's newest weights, fp32 under the unsplit model's names, and the model's settings
    (``config.json``) into a folder.

    Args:
        folder: the run's.
        file_format: ``safetensors``: ``model.safetensors``, where of a tied weight only the first
            name is stored and the metadata tells the others; ``dcp``: what
            ``torch.distributed.checkpoint.load`` reads, whose own metadata is a pickle.
        out: the folder to write; ``None``: ``export`` in the run's.

    Returns:
        The folder.

    Raises:
        ConfigError: it is no run.
        CheckpointError: the run has left no weights yet, or no checkpoint is whole.
    """
    path, _ = config_to_resume(folder)
    config = read_resolved_config(path)
    weights = _newest_weights(folder, config.model.size())
    target = out or folder / _EXPORT
    target.mkdir(parents=True, exist_ok=True)
    if file_format == "safetensors":
        save_weights(weights, config.model.size(), target / "model.safetensors")
    else:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            save(weights, checkpoint_id=target, no_dist=True)
    write_json(target / "config.json", config.model.model_dump(exclude={"init_from"}))
    return target


def import_weights(file: Path, config_file: Path, overrides: Mapping[str, str]) -> Path:
    """Make a run that starts from the weights of a safetensors file; a copy is kept with it.

    Args:
        file: what `export_run` has written, or the weights of a run.
        config_file: the TOML file.
        overrides: of its settings, by dotted name.

    Returns:
        The run's folder, for ``twobw train --resume``.

    Raises:
        ConfigError: a problem of the config, or the weights do not fit the model.
    """
    config = load_config(config_file, {**overrides, "model.init_from": str(file)})
    check_initial_weights(config)
    folder = open_run(config, {}, None).folder
    initial = folder.absolute() / _INITIAL
    shutil.copyfile(file.expanduser(), initial)
    model = config.model.model_copy(update={"init_from": str(initial)})
    write_config(folder, config.model_copy(update={"model": model}))
    return folder


def _newest_weights(folder: Path, size: GPTConfig | BertConfig) -> dict[str, Tensor]:
    """Those that the run ended with; of one that has not ended, those of its newest checkpoint."""
    if (folder / SUMMARY).is_file() and (folder / WEIGHTS).is_file():
        return load_file(folder / WEIGHTS)
    found = newest_whole(folder / CHECKPOINTS)
    stored, aliases = Stored(found.folder, found.manifest), tied_names(size)
    return {
        name: stored.read("weights", "rest", name=name).to(tensor.dtype)
        for name, tensor in shapes_of(size).state_dict().items()
        if name not in aliases
    }
