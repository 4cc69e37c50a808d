"""The five systems of the 2BW paper, predicted: what `paper.py` puts into its tables.

Pipelines are what the planner predicts of them. Tensor parallelism is modelled here: the planner
does not offer it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from twobw.config import Config, load_config
from twobw.planner.cluster import ClusterSpec
from twobw.planner.configuration import Configuration, Recompute, Training
from twobw.planner.memory import stage_memory
from twobw.planner.placement import Ring
from twobw.planner.plan import Plan
from twobw.planner.search import find_plan, find_plans
from twobw.profiler.analytic import compute_profile
from twobw.profiler.device import find_device
from twobw.profiler.profile import ModelProfile

HERE = Path(__file__).parent
GIVEN: dict[str, Any] = tomllib.loads((HERE / "paper.toml").read_text("utf-8"))
MICROBATCH_SIZES = (1, 2, 4, 8, 16)
GPUS_PER_SERVER = 8
SEQUENCE = 512  # tokens of a sample, in all of the paper's models
SCHEDULES = {
    "inter-layer": "no-pipeline",
    "GPipe": "gpipe",
    "PipeDream-Flush": "1f1b",
    "2BW": "2bw",
}
TENSOR = "tensor"
SYSTEMS = ("inter-layer", TENSOR, "GPipe", "PipeDream-Flush", "2BW")  # as in the paper's figures
WITH: tuple[Recompute, ...] = ("layer", "stage")
WITHOUT: tuple[Recompute, ...] = ("none",)


@dataclass(frozen=True)
class Prediction:
    """A system at its best that fits.

    Attributes:
        rate: sequences a second on all GPUs.
        memory_gb: of the fullest GPU at its peak, in 1e9 bytes.
        how: its configuration.
    """

    rate: float
    memory_gb: float
    how: str


def cluster(num_servers: int) -> ClusterSpec:
    """Servers of 8 V100s."""
    links = GIVEN["links"]
    inside, between = (
        {key: links[name][key] for key in ("bytes_per_second", "latency_ns")}
        for name in ("inside", "between")
    )
    return ClusterSpec(
        name=f"{num_servers * GPUS_PER_SERVER} V100",
        nodes=num_servers,
        devices_per_node=GPUS_PER_SERVER,
        device_memory_bytes=GIVEN["device"]["memory_bytes"],
        inside=inside,
        between=between,
    )


def model_config(num_layers: int, width: int, num_heads: int, *, is_bert: bool = False) -> Config:
    """A GPT or BERT of the paper: sequences of 512, mixed precision, Adam."""
    model = {
        "dropout": "0.1",  # as in GPT-2, Megatron-LM and BERT
        "name": "bert-large" if is_bert else "gpt-1.3b",
        "num_layers": str(num_layers),
        "width": str(width),
        "num_heads": str(num_heads),
    }
    settings = {f"model.{key}": value for key, value in model.items()}
    settings |= {"training.precision": "fp16", "optimizer.name": "adamw"}
    return load_config(HERE.parent / "configs/demo.toml", settings)


@cache
def profile(model: str) -> ModelProfile:
    """Computed for the paper's device."""
    config = model_config(*GIVEN["models"][model], is_bert=model.startswith("bert"))
    return compute_profile(config, MICROBATCH_SIZES, find_device(GIVEN["device"]["name"]))


def predict(
    system: str, model: str, num_servers: int, batch: int, *, pp: int | None = None
) -> Prediction | None:
    """A system at its best; None: nothing fits.

    Args:
        system: one of `SYSTEMS`.
        model: by name.
        num_servers: of 8 GPUs.
        batch: global.
        pp: stages of a pipeline, all GPUs being used; None: any depth. Tensor parallelism is over
            the GPUs of a server, replicas are over servers.
    """
    if system == TENSOR:
        every = (
            tensor_parallel(model, num_servers, batch, size, recomputes=recomputes)
            for size, recomputes in product(MICROBATCH_SIZES, (False, True))
        )
        return _fastest(every)
    given, schedule = cluster(num_servers), SCHEDULES[system]
    if pp is None:
        plans = find_plans(
            profile(model), given, Training(batch), top=1, schedules=[schedule]
        ).plans
        return of_plan(plans[0]) if plans else None
    dp = given.num_devices // pp
    return _fastest(
        at(model, schedule, pp, dp, batch, size, recompute)
        for size, recompute in product(MICROBATCH_SIZES, (*WITHOUT, *WITH))
    )


def gpipe_in_parts(model: str, num_servers: int, batch: int, *, pp: int) -> Prediction | None:
    """GPipe that flushes within a batch as often as it must to fit."""
    parts = 1
    while batch % parts == 0:
        found = predict("GPipe", model, num_servers, batch // parts, pp=pp)
        if found is not None:
            return replace(found, how=f"{found.how}, {parts} flushes" if parts > 1 else found.how)
        parts *= 2
    return None


def at(
    model: str, schedule: str, pp: int, dp: int, batch: int, size: int, recompute: Recompute
) -> Prediction | None:
    """One configuration; None: it does not fit, or its numbers do not go into each other."""
    if batch % (size * dp):
        return None
    configuration = Configuration(pp, dp, size, batch // (size * dp), schedule, recompute)
    given = cluster(-(-pp * dp // GPUS_PER_SERVER))
    found = find_plan(profile(model), given, Training(batch), configuration)
    return of_plan(found) if isinstance(found, Plan) else None


def of_plan(plan: Plan) -> Prediction:
    how = f"({plan.dp}, {plan.pp}) b={plan.microbatch_size}"
    if plan.recompute != "none":
        how += f" recompute {plan.recompute}"
    return Prediction(plan.samples_per_second, plan.peak_bytes / 1e9, how)


def _fastest(predictions: Iterable[Prediction | None]) -> Prediction | None:
    found = [one for one in predictions if one is not None]
    return max(found, key=lambda one: one.rate, default=None)


def tensor_parallel(
    model: str, num_servers: int, batch: int, size: int, *, recomputes: bool
) -> Prediction | None:
    """Tensor parallelism over the GPUs of a server (Shoeybi et al., 2019, Megatron-LM), replicas
    over servers; None: it does not fit.

    Every GPU has a share of each product; that it becomes narrow is not counted. What stands
    between a block's products is shared but for what all GPUs do alike (`_undivided`). All-reduces
    are: of a block's output after its attention and after its MLP in the forward, of the gradients
    at the same places in the backward, and with recompute those of the forward again; of the
    embedding's output, of the gradient of the head's input, and three numbers a token for the loss.
    Nothing hides them, nor the sum of gradients over servers, whose link a server's GPUs share.
    """
    if batch % (size * num_servers):
        return None
    given, layers, width, num_heads = profile(model), *GIVEN["models"][model]
    count = batch // (size * num_servers)
    entries = [given.layer(index) for index in range(given.num_layers)]
    costs = [entry.at(size) for entry in (*entries, given.loss)]
    times = [c.forward_ns + c.backward_ns + c.recompute_ns * recomputes for c in costs]
    share = 1 / GPUS_PER_SERVER
    of_blocks = share + (1 - share) * _undivided(width, num_heads)
    computing_ns = (times[0] + sum(times[-2:])) * share + sum(times[1:-2]) * of_blocks
    vectors = _all_reduce_ns(2 * size * SEQUENCE * width)
    numbers = _all_reduce_ns(4 * size * SEQUENCE)
    reducing_ns = (layers * (6 if recomputes else 4) + 2) * vectors + 3 * numbers
    update_ns = sum(entry.update_ns for entry in entries) / GPUS_PER_SERVER
    gradient_bytes = sum(entry.gradient_bytes for entry in entries) / GPUS_PER_SERVER
    between = GIVEN["links"]["between"]
    rate = between["bytes_per_second"] / GPUS_PER_SERVER
    servers = Ring(num_servers, between["latency_ns"], rate).all_reduce_ns(gradient_bytes)
    batch_ns = count * (computing_ns + reducing_ns) + update_ns + servers
    memory = _tensor_bytes(given, size, width, num_heads, recomputes=recomputes)
    if memory > GIVEN["device"]["memory_bytes"]:
        return None
    how = f"({num_servers}, {GPUS_PER_SERVER}-way) b={size}" + " recompute layer" * recomputes
    return Prediction(batch / batch_ns * 1e9, memory / 1e9, how)


def _undivided(width: int, num_heads: int) -> float:
    """The part of a block's time that is for what every GPU does alike. A block reaches so much of
    the rate of products alone; the rest of its time goes by bytes, and of these ``10 sbh`` of
    ``sbh (34 + 5 a s / h)`` are of what is not divided (equation 2, as in `_layer_bytes`)."""
    rate = find_device(GIVEN["device"]["name"]).matrix["fp16"]
    products = rate.flops_per_second * rate.efficiency / GIVEN["products"]["flops_per_second"]
    return (1 - products) * 10 / (34 + 5 * num_heads * SEQUENCE / width)


def _all_reduce_ns(num_bytes: int) -> int:
    link = GIVEN["links"]["all_reduce"]
    ring = Ring(GPUS_PER_SERVER, link["latency_ns"], link["bytes_per_second"])
    return link["start_ns"] + ring.all_reduce_ns(num_bytes)


def _tensor_bytes(
    given: ModelProfile, size: int, width: int, num_heads: int, *, recomputes: bool
) -> float:
    """Of one GPU. Until a layer is run again it keeps its input; what the loss has in use is shared
    as the vocabulary is."""
    entries = [given.layer(index) for index in range(given.num_layers)]
    held = sum(
        entry.parameter_bytes + entry.gradient_bytes + entry.main_bytes + entry.optimizer_bytes
        for entry in entries
    )
    loss = entries[-1].at(size).output_bytes + given.loss.at(size).backward_peak_bytes
    layer, num_blocks = _layer_bytes(size, width, num_heads), given.num_layers - 2
    inputs = num_blocks * 2 * size * SEQUENCE * width
    kept = inputs + layer if recomputes else num_blocks * layer
    return (held + loss) / GPUS_PER_SERVER + kept


def _layer_bytes(size: int, width: int, num_heads: int) -> float:
    """What a block keeps for its backward under tensor parallelism: ``sbh (10 + 24 / t +
    5 a s / (h t))`` (Korthikanti et al., 2022, arXiv 2205.05198, equation 2)."""
    t = GPUS_PER_SERVER
    return size * SEQUENCE * width * (10 + 24 / t + 5 * num_heads * SEQUENCE / (width * t))


def largest_gpt(pp: int) -> tuple[int, float]:
    """Blocks and billions of parameters of the largest GPT of hidden size 1,024 that 2BW trains on
    ``pp`` GPUs: microbatches of 1, recompute, and updates that wait for their overflow check, so
    that there is one gradient. Each stage has as many blocks as fit."""
    one = _small_gpt()
    counts = [_most_blocks(one, pp, stage) for stage in range(pp)]
    parameters = sum(counts) * one.layer(1).num_parameters
    parameters += one.layer(0).num_parameters + one.layer(2).num_parameters
    parameters -= one.ties[0].num_parameters
    return sum(counts), parameters / 1e9


@cache
def _small_gpt() -> ModelProfile:
    """Embedding, block and head."""
    config = model_config(1, 1024, 16)
    return compute_profile(config, (1,), find_device(GIVEN["device"]["name"]))


def _most_blocks(one: ModelProfile, pp: int, stage: int) -> int:
    """That fit a stage."""
    fewest, too_many = 0, 2
    while _stage_bytes(one, pp, stage, too_many) <= GIVEN["device"]["memory_bytes"]:
        fewest, too_many = too_many, 2 * too_many
    while too_many - fewest > 1:
        middle = (fewest + too_many) // 2
        if _stage_bytes(one, pp, stage, middle) <= GIVEN["device"]["memory_bytes"]:
            fewest = middle
        else:
            too_many = middle
    return fewest


def _stage_bytes(one: ModelProfile, pp: int, stage: int, num_blocks: int) -> int:
    """At the leaner recompute."""
    blocks = [1] * pp
    blocks[stage] = num_blocks
    split = list(blocks)
    split[0] += 1
    split[-1] += 1
    model = _with_blocks(one, sum(blocks))
    training = Training(2 * pp, overlap_reduce=False)
    schedule = "2bw" if pp > 1 else "1f1b"  # one stage needs no older version
    return min(
        stage_memory(
            model, training, Configuration(pp, 1, 1, 2 * pp, schedule, recompute), split, stage
        ).total
        for recompute in WITH
    )


def _with_blocks(one: ModelProfile, num_blocks: int) -> ModelProfile:
    tie = one.ties[0].model_copy(update={"layers": (0, num_blocks + 1)})
    layers: Sequence[int] = (0, *[1] * num_blocks, 2)
    return one.model_copy(update={"layers": tuple(layers), "ties": (tie,)})
