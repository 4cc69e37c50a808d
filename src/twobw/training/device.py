"""The device of a rank: which one, how a batch gets there, what it could compute at most."""

from __future__ import annotations

import os
import re

import torch
from torch import Tensor

# FLOP/s of dense 16-bit matrix products, as the makers' data sheets give them, by words that the
# device's name contains; the first that it does counts.
_PEAK_FLOPS = (
    ("B200", 2250e12),
    ("H200", 989e12),
    ("H100 NVL", 835e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("L4", 121e12),
    ("A10", 125e12),
    ("V100", 125e12),
    ("T4", 65e12),
    ("MI300X", 1307e12),
)


def own_device(wanted: str = "auto") -> torch.device:
    """The GPU of this machine that is this rank's, by ``LOCAL_RANK``; the CPU without GPUs, or
    where ``wanted`` (``training.device``) says so.

    Raises:
        RuntimeError: there are fewer GPUs than ranks on this machine.
    """
    count = 0 if wanted == "cpu" else torch.cuda.device_count()
    if count == 0 and wanted != "cuda":
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    if index >= count:
        raise RuntimeError(
            f"local rank {index} has no GPU: this machine has {count}, and NCCL allows one rank a "
            "GPU; start fewer ranks here (pp * dp), or hide the GPUs (CUDA_VISIBLE_DEVICES=) to "
            "train on the CPU"
        )
    return torch.device("cuda", index)


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """A batch's tensor on ``device``; to a GPU it is copied behind what runs there."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def peak_flops(device: torch.device) -> float | None:
    """FLOP/s that a GPU does at most in 16 bits; ``None`` where that is not known."""
    if device.type != "cuda":
        return None
    return peak_flops_of(torch.cuda.get_device_name(device))


def peak_flops_of(name: str) -> float | None:
    """FLOP/s of a GPU by its name; ``None`` for one that is not in the table."""
    return next((flops for words, flops in _PEAK_FLOPS if re.search(rf"\b{words}\b", name)), None)
