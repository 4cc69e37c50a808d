"""What a rank takes whatever its layers are: the executor's overhead, and the link to the next."""

from __future__ import annotations

import time
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from twobw import Pipeline
from twobw.config import Config
from twobw.core.rank_grid import RankGrid
from twobw.profiler.profile import LinkProfile
from twobw.profiler.timing import clock_ns, trivial_layer
from twobw.runtime.mesh import distributed_mesh
from twobw.runtime.messages import Message
from twobw.runtime.transport import Channel, Transport
from twobw.training.optimizer import make_lr_scheduler, make_optimizer

LONG_MESSAGE_BYTES = 1 << 22
"""By which a link's bandwidth is measured, at least."""

_BATCHES = 60
_MICROBATCHES = (1, 17)
_PINGS = 50
_ARRIVAL_S = 0.004  # by when a small message has surely arrived
_CACHE_BYTES = 1 << 25  # more than a core's share of the caches


def time_batches(config: Config, device: torch.device) -> tuple[int, int]:
    """``op_ns`` and ``batch_ns`` of `OverheadProfile`, in processor time: batches of few and of
    many microbatches through a trivial layer, on one stage that waits for nobody. Not within a
    process group."""
    few, many = _MICROBATCHES
    short, long = (_batch_ns(config, device, count) for count in _MICROBATCHES)
    op_ns = max(long - short, 0) / (many - few) / 2
    return round(op_ns), max(round(short - 2 * few * op_ns), 0)


def _batch_ns(config: Config, device: torch.device, num_microbatches: int) -> float:
    batch = torch.zeros(num_microbatches, 1, device=device)
    times: list[int] = []
    with Pipeline(
        [trivial_layer().to(device)],
        lambda output, target: output.mean(),
        make_optimizer(config.optimizer),
        schedule="1f1b",
        num_microbatches=num_microbatches,
        pp=1,
        lr_scheduler=make_lr_scheduler(config.optimizer, config.training.num_batches),
        precision=config.training.precision,
    ) as pipeline:
        for _ in range(_BATCHES):
            start_ns = time.process_time_ns()
            float(pipeline.train_step(batch, batch).loss)
            times.append(time.process_time_ns() - start_ns)
        pipeline.drain()
    return median(times[_BATCHES // 6 :])


def time_link(device: torch.device, num_bytes: int, timeout_s: float) -> tuple[LinkProfile, int]:
    """The link between ranks 0 and 1 by messages there and back, and ``message_ns`` of
    `OverheadProfile` in processor time, both through the runtime's transport. Every rank calls it,
    idle otherwise; what it gives counts on rank 0.

    Args:
        device: of this rank.
        num_bytes: of a long message, at least `LONG_MESSAGE_BYTES`.
        timeout_s: seconds that one wait may last.
    """
    mesh = distributed_mesh(RankGrid(dist.get_world_size(), 1), [], device, timeout_s)
    short, long = (torch.zeros(count, dtype=torch.uint8, device=device) for count in (1, num_bytes))
    message_ns, latency_ns, transfer_ns = 0.0, 0.0, 1.0
    if mesh.stage <= 1:
        message_ns = _message_ns(mesh.transport, mesh.stage, short, key=0)
        latency_ns = _one_way_ns(mesh.transport, mesh.stage, short, key=1)
        long_ns = _one_way_ns(mesh.transport, mesh.stage, long, key=2)
        transfer_ns = max(long_ns - latency_ns, transfer_ns)
    dist.barrier()  # a transport that goes takes with it what it has not sent yet
    link = LinkProfile(
        latency_ns=round(latency_ns), bytes_per_second=round(num_bytes * 1e9 / transfer_ns)
    )
    return link, round(message_ns)


def _message_ns(transport: Transport, stage: int, short: Tensor, key: int) -> float:
    """What sending takes, and receiving what has arrived: the mean of both medians. A rank comes to
    either from its layers, which have filled the caches with what is theirs."""
    peer = 1 - stage
    layers = torch.zeros(_CACHE_BYTES // 4)
    sends: list[int] = []
    receives: list[int] = []
    for _ in range(_PINGS):
        transport.expect(peer, Channel.STATE, key)
        layers.add_(1.0)
        start_ns = time.thread_time_ns()
        transport.send(peer, Channel.STATE, key, Message.of(short))
        sends.append(time.thread_time_ns() - start_ns)
        time.sleep(_ARRIVAL_S)
        layers.add_(1.0)
        start_ns = time.thread_time_ns()
        transport.receive(peer, Channel.STATE)
        receives.append(time.thread_time_ns() - start_ns)
    return (median(sends) + median(receives)) / 2


def _one_way_ns(transport: Transport, stage: int, tensor: Tensor, key: int) -> float:
    """Half of the fastest way there and back: what makes another slower is not the link, but a rank
    that has to wait for a processor."""
    peer = 1 - stage
    times: list[int] = []
    for _ in range(_PINGS):
        transport.expect(peer, Channel.STATE, key)
        start_ns = clock_ns(tensor.device)
        if stage == 0:
            transport.send(peer, Channel.STATE, key, Message.of(tensor))
        transport.receive(peer, Channel.STATE)
        if stage == 1:
            transport.send(peer, Channel.STATE, key, Message.of(tensor))
        times.append(clock_ns(tensor.device) - start_ns)
    return min(times) / 2
