"""What a run needs of this machine, before any rank starts: GPUs, and memory for its plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from twobw.config import Config, ConfigError
from twobw.planner.memory import stage_memory
from twobw.planner.partition import balance
from twobw.profiler.profile import ModelProfile
from twobw.training.machine import available_bytes
from twobw.training.planning import configuration_of, training_of

PROCESS_BYTES = 300e6
"""Of a rank on a CPU, before it has a model: the interpreter, torch, its libraries."""

_SURE = 0.25  # of the memory: what needs less by a rough bound is not looked at further
_GB = 1e9

Profiler = Callable[[Config, Sequence[int]], ModelProfile]
"""Computes a profile without running anything (`twobw.profiler.analytic.compute_profile`)."""


def check_resources(config: Config, profiler: Profiler) -> None:
    """Make sure that this machine has the GPUs and the memory for all ranks of a run.

    Raises:
        ConfigError: it has not.
    """
    import torch

    count = 0 if config.training.device == "cpu" else torch.cuda.device_count()
    if problem := device_problem(config, count):
        raise ConfigError("this machine", [problem])
    if count:
        available = [torch.cuda.mem_get_info(index)[1] for index in range(config.num_ranks)]
        problem = memory_problem(config, profiler, device_bytes=min(available))
    else:
        problem = memory_problem(config, profiler, host_bytes=available_bytes())
    if problem:
        raise ConfigError("this machine", [problem])


def device_problem(config: Config, num_gpus: int) -> str | None:
    """Why a machine with so many GPUs will not do."""
    if num_gpus == 0 and config.training.device == "cuda":
        return (
            'training.device = "cuda": this machine has no GPU that torch can use (is this a CPU '
            'build of torch, or CUDA_VISIBLE_DEVICES empty?); set it to "cpu" or "auto"'
        )
    if 0 < num_gpus < config.num_ranks:
        pp, dp = config.parallel.pp, config.parallel.dp
        return (
            f"parallel.pp * parallel.dp = {pp} * {dp} = {pp * dp}: there are {num_gpus} GPUs, and "
            'each rank needs one; start fewer ranks, or set training.device = "cpu"'
        )
    return None


def memory_problem(
    config: Config,
    profiler: Profiler,
    *,
    host_bytes: float | None = None,
    device_bytes: float | None = None,
) -> str | None:
    """What is wrong where the memory predicted is more than there is.

    Args:
        config: of the run.
        profiler: computes the model's profile.
        host_bytes: what all ranks share, on a CPU.
        device_bytes: or what each has.
    """
    limit = host_bytes or device_bytes or 0.0
    if rough_bytes(config) < _SURE * limit:
        return None
    model = config.model
    least = 4 * 12 * model.num_layers * model.width**2  # one version of the blocks' matrices
    if least > limit * (config.parallel.pp if device_bytes else 1):
        return (
            f"not enough memory: the weights alone take {least / _GB:.2f} GB (model.num_layers = "
            f"{model.num_layers}, model.width = {model.width}), and {limit / _GB:.2f} GB are "
            "available; take a smaller model, or another machine"
        )
    stages = predicted_bytes(config, profiler)
    shown = ", ".join(f"stage {s}: {b / _GB:.2f} GB" for s, b in enumerate(stages))
    if host_bytes is not None:
        total = config.parallel.dp * sum(stages) + config.num_ranks * PROCESS_BYTES
        what = f"{total / _GB:.2f} GB for all {config.num_ranks} ranks"
    else:
        total, what = max(stages), f"{max(stages) / _GB:.2f} GB on a GPU"
    if total <= limit:
        return None
    return (
        f"not enough memory: the plan takes {what} as predicted ({shown}), and {limit / _GB:.2f} "
        "GB are available; take more parallel.num_microbatches or a smaller "
        'training.global_batch_size, training.recompute = "layer", or another machine'
    )


def predicted_bytes(config: Config, profiler: Profiler) -> list[int]:
    """The peak of each stage."""
    parallel = config.parallel
    pieces = parallel.num_microbatches * parallel.dp
    size = -(-config.training.global_batch_size // pieces)  # the largest microbatch
    profile = profiler(config, [size])
    layers = [profile.layer(index) for index in range(config.model.size().list_length)]
    split = parallel.split or balance([layer.num_parameters + 1 for layer in layers], parallel.pp)
    configuration = configuration_of(config, size)
    return [
        stage_memory(profile, training_of(config), configuration, split, stage).total
        for stage in range(parallel.pp)
    ]


def rough_bytes(config: Config) -> float:
    """More than all ranks can need: three versions of weights with all that belongs to them, and
    the activations of a whole batch."""
    model, dp = config.model, config.parallel.dp
    versions = max(3, config.parallel.pp)
    count = model.num_layers * (12 * model.width + 32) * model.width
    count += (2 * model.vocab_size + model.sequence_length + 32 + model.width) * model.width
    weights = dp * count * (4 * versions + 16)
    tokens = config.training.global_batch_size * model.sequence_length
    a_block = 40 * model.width + 8 * model.num_heads * model.sequence_length
    activations = 4 * tokens * (model.num_layers * a_block + 12 * model.vocab_size)
    return weights + activations + config.num_ranks * PROCESS_BYTES
