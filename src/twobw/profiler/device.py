"""`DeviceSpec`: what must be known of a device to tell how long a layer takes on it. No torch."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Positive = Annotated[float, Field(gt=0.0)]
Fraction = Annotated[float, Field(gt=0.0, le=1.0)]


class DeviceError(ValueError):
    """A description of a device that will not do, with every problem found."""


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class MatrixRate(_Table):
    """Matrix products in one precision.

    Attributes:
        flops_per_second: the most there can be.
        efficiency: the part of it that a transformer's layers reach with many tokens, everything
            between the products included.
    """

    flops_per_second: Positive
    efficiency: Fraction


class DeviceSpec(_Table):
    """A device.

    Attributes:
        name: for the profile.
        memory_bytes_per_second: that copying reaches.
        half_efficiency_tokens: with so many tokens in a microbatch half of a `MatrixRate`'s
            efficiency is reached; with ``n``, ``n / (n + half_efficiency_tokens)`` of it.
        fused_attention: whether attention keeps no matrix of all pairs of tokens (FlashAttention).
        matrix: by precision (``fp32``, ``bf16``, ``fp16``); those that there are.
    """

    name: Annotated[str, Field(min_length=1)]
    memory_bytes_per_second: Positive
    half_efficiency_tokens: Annotated[float, Field(ge=0.0)] = 0.0
    fused_attention: bool = True
    matrix: Annotated[Mapping[str, MatrixRate], Field(min_length=1)]

    def flops_per_second(self, precision: str, num_tokens: int) -> float:
        """What matrix products reach with ``num_tokens`` in a microbatch.

        Raises:
            DeviceError: the device has not got the precision.
        """
        if precision not in self.matrix:
            known = ", ".join(self.matrix)
            raise DeviceError(f"{self.name} has no rate for {precision}; it has {known}")
        rate = self.matrix[precision]
        part = num_tokens / (num_tokens + self.half_efficiency_tokens)
        return rate.flops_per_second * rate.efficiency * part


# Rates are those of NVIDIA's data sheets, dense, of the SXM form. Memory is what an elementwise
# product was measured to reach (github.com/mli/transformers-benchmarks, README: V100 784 of 900
# GB/s, A100 80 GB 1616 of 2039), for others the A100's part of the data sheet's, 79 %: an
# assumption for the A100 40 GB (of 1555) and the H100 (of 3350).
#
# Efficiency in 16 bits is that of whole models, since a layer also waits for what stands between
# its products:
#   V100  39 TFLOP/s, GPT 1.2B, later 62, in a DGX-2H (Megatron-LM, 2019, and
#         nv-adlr.github.io/MegatronLMV1); about 45, GPT 355M (the 2BW paper); 36 a GPT-2 layer, 64
#         a BERT-large layer of large batches (transformers-benchmarks). 40 % of 125 lies between.
#   A100  137 TFLOP/s, GPT 1.7B, to 163, GPT 1T (Narayanan et al., 2021, SC21, table 1): 44 % to
#         52 % of 312; 48 % lies between.
#   H100  41 % to 48 % of 989 (Megatron-LM's README, GPT 2B to 462B); 45 %.
# In fp32 plain products reach 14 of 15.7 TFLOP/s on a V100 (transformers-benchmarks); a layer is
# taken to reach 80 %, on all devices, for which no measurement was found. TF32 is off, as it is in
# torch unless asked for.
#
# Tokens for half of it: a BERT-large layer on an RTX 3090 Ti reaches 75 %, 82 %, 89 %, 93 % with
# 1024, 2048, 4096, 8192 tokens of what it reaches at best (transformers-benchmarks,
# micro_bench.ipynb), which is 350 to 640; taken as 500 for the V100. On an A100 microbatches of 16
# are up to 1.3 times as fast as those of 1, of 2048 tokens each (SC21, figure 7): 670. For the H100
# nothing was found; the A100's, times the ratio of rates.
DEVICES: dict[str, DeviceSpec] = {
    spec.name: spec
    for spec in (
        DeviceSpec(
            name="v100-16gb",
            memory_bytes_per_second=784e9,
            half_efficiency_tokens=500,
            fused_attention=False,  # FlashAttention begins with Ampere
            matrix={
                "fp32": MatrixRate(flops_per_second=15.7e12, efficiency=0.8),
                "fp16": MatrixRate(flops_per_second=125e12, efficiency=0.4),
            },
        ),
        *(
            DeviceSpec(
                name=name,
                memory_bytes_per_second=bytes_per_second,
                half_efficiency_tokens=670,
                matrix={
                    "fp32": MatrixRate(flops_per_second=19.5e12, efficiency=0.8),
                    "fp16": MatrixRate(flops_per_second=312e12, efficiency=0.48),
                    "bf16": MatrixRate(flops_per_second=312e12, efficiency=0.48),
                },
            )
            for name, bytes_per_second in (("a100-40gb", 1230e9), ("a100-80gb", 1616e9))
        ),
        DeviceSpec(
            name="h100-80gb",
            memory_bytes_per_second=2650e9,
            half_efficiency_tokens=2100,
            matrix={
                "fp32": MatrixRate(flops_per_second=67e12, efficiency=0.8),
                "fp16": MatrixRate(flops_per_second=989e12, efficiency=0.45),
                "bf16": MatrixRate(flops_per_second=989e12, efficiency=0.45),
            },
        ),
    )
}
"""Devices by name."""


def find_device(name: str) -> DeviceSpec:
    """A device by its name, or the description in a TOML file.

    Raises:
        DeviceError: neither a known name nor a file with a whole description.
    """
    if name in DEVICES:
        return DEVICES[name]
    path = Path(name)
    try:
        data = tomllib.loads(path.read_text("utf-8"))
        return DeviceSpec.model_validate(data)
    except FileNotFoundError:
        known = ", ".join(DEVICES)
        problem = f"device {name!r} is not one of {known}, and there is no such file"
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        problem = f"{name} cannot be read as TOML: {error}"
    except ValidationError as error:
        lines = [
            f"{'.'.join(str(part) for part in detail['loc'])}: {detail['msg']}"
            for detail in error.errors(include_url=False)
        ]
        problem = "\n  ".join([f"{name} describes no device:", *lines])
    raise DeviceError(problem)
