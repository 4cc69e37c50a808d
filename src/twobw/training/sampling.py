"""Text from a trained run: load its weights, draw one byte after another."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from twobw.config import read_resolved_config
from twobw.models.sizes import GPTConfig
from twobw.training.run_folder import CONFIG, WEIGHTS
from twobw.training.weights import load_weights

_NUM_BYTES = 256
_FIRST_TOKEN = b"\n"  # what an empty prompt starts from


class RunError(ValueError):
    """A run that cannot be sampled from."""


def sample_run(
    folder: Path,
    prompt: bytes,
    num_tokens: int = 400,
    *,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
) -> bytes:
    """What the run's model writes after ``prompt`` (see `generate`).

    Raises:
        RunError: as `load_run`.
        ValueError: as `generate`.
    """
    model, sequence_length = load_run(folder)
    return generate(
        model,
        prompt,
        num_tokens,
        sequence_length=sequence_length,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
    )


def load_run(folder: Path) -> tuple[nn.Sequential, int]:
    """The model of a run's folder, with its last saved weights, and its sequence length.

    Raises:
        RunError: there is no such run, it is not one of a GPT, it has saved no weights yet, or
            the weights are damaged or not of the model that its config describes.
        ConfigError: the run's config is damaged.
    """
    if not (folder / CONFIG).is_file():
        raise RunError(f"{folder} is not a run: it has no {CONFIG}{_nearest_run(folder)}")
    config = read_resolved_config(folder / CONFIG).model.size()
    if not isinstance(config, GPTConfig):
        raise RunError(f"{folder} is a run of a BERT, which writes no text; sample takes a GPT's")
    weights = folder / WEIGHTS
    if not weights.is_file():
        raise RunError(f"{folder} has no {WEIGHTS} yet: a run saves its weights when it ends")
    try:
        return load_weights(config, weights), config.sequence_length
    except (OSError, SafetensorError) as error:
        raise RunError(f"{weights} cannot be read: {error}") from error
    except RuntimeError as error:  # names or shapes
        raise RunError(f"{weights} does not fit the model of {folder / CONFIG}: {error}") from error


def _nearest_run(folder: Path) -> str:
    runs = {path.parent.name: path.parent for path in sorted(folder.parent.glob(f"*/{CONFIG}"))}
    if near := get_close_matches(folder.name, runs, n=1, cutoff=0.5):
        return f"; did you mean {runs[near[0]]}?"
    return f"; the runs beside it are {', '.join(runs)}" if runs else ""


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: bytes,
    num_tokens: int,
    *,
    sequence_length: int,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
) -> bytes:
    """The ``num_tokens`` bytes that ``model`` writes after ``prompt``; the same for a seed.

    Args:
        model: tokens ``(1, t)`` to logits ``(1, t, vocab_size)``; put in evaluation mode.
        prompt: what to continue; its last ``sequence_length`` bytes are seen. An empty one starts
            a new line.
        num_tokens: bytes to write.
        sequence_length: the most bytes that the model can see.
        temperature: 0 takes the likeliest byte; above it, logits are divided by it.
        top_k: draw among the ``top_k`` likeliest bytes only; None: among all.
        seed: of the draws.

    Raises:
        ValueError: a number out of its range, or the model gives logits that are not finite.
    """
    _check("num_tokens", num_tokens, num_tokens >= 0, "at least 0")
    _check("temperature", temperature, 0 <= temperature < float("inf"), "0 or more, and finite")
    _check("top_k", top_k, top_k is None or top_k >= 1, "at least 1")
    _check("seed", seed, 0 <= seed < 2**63, "0 or more and below 2**63")
    generator = torch.Generator().manual_seed(seed)
    model.eval()
    tokens = list(prompt or _FIRST_TOKEN)
    start = len(tokens)
    for _ in range(num_tokens):
        seen = torch.tensor([tokens[-sequence_length:]])
        logits = model(seen)[0, -1, :_NUM_BYTES]  # a larger vocabulary has no text for the rest
        tokens.append(_draw(logits, temperature, top_k, generator))
    return bytes(tokens[start:])


def _draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if not logits.isfinite().all():
        raise ValueError("the model's logits are not finite: its training has diverged")
    if temperature == 0:
        return int(logits.argmax())
    values, candidates = logits.topk(min(top_k or len(logits), len(logits)))
    # In double, and with 0 the largest, so that even the smallest temperature divides well.
    probabilities = ((values - values[0]).double() / temperature).softmax(0)
    return int(candidates[torch.multinomial(probabilities, 1, generator=generator)])


def _check(name: str, value: object, is_allowed: bool, allowed: str) -> None:
    if not is_allowed:
        raise ValueError(f"{name} is {value}; it must be {allowed}")
