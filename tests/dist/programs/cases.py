"""What the process tests train: the same on gloo processes and on the plain references."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

SEED = 7


class Fork(nn.Module):
    """Gives a tuple: a float, an integer, a boolean, an unused output, None."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 2)

    def forward(self, x: Tensor):
        return (
            self.linear(x).t().contiguous().t(),
            x[:, 0].round().long(),
            x > 0,
            self.unused(x),
            None,
        )


class Middle(nn.Module):
    """Passes a tuple on, with one float changed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, parts):
        return self.norm(parts[0]), *parts[1:]


class Join(nn.Module):
    """Takes the tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, parts):
        x, rows, mask, _, nothing = parts
        assert nothing is None
        return self.linear(x * mask + rows[:, None])


def mixed_layers() -> list[nn.Module]:
    torch.manual_seed(3)
    return [Fork(), Middle(), Join()]


def plain_layers() -> list[nn.Module]:
    torch.manual_seed(3)
    return [
        nn.Conv1d(2, 4, 3, padding=1),
        nn.BatchNorm1d(4),
        nn.Sequential(nn.Dropout(0.2), nn.LayerNorm(6)),
        nn.Conv1d(4, 3, 3),
        nn.Sequential(nn.Flatten(), nn.Linear(12, 1)),
    ]


class ChannelsLast(nn.Module):
    """Changes the memory format, which the next stage must get as it is."""

    def forward(self, x: Tensor) -> Tensor:
        return x.contiguous(memory_format=torch.channels_last)


class StaysChannelsLast(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        assert x.is_contiguous(memory_format=torch.channels_last)
        return super().forward(x)


def image_layers() -> list[nn.Module]:
    torch.manual_seed(3)
    return [
        nn.Sequential(ChannelsLast(), nn.Conv2d(3, 8, 3, padding=1)),
        StaysChannelsLast(8, 4, 3, padding=1),
        nn.Sequential(StaysChannelsLast(4, 2, 3), nn.Flatten(), nn.Linear(18, 1)),
    ]


def batches(*shapes: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(shape, generator=generator), torch.randn(shape[0], 1, generator=generator))
        for shape in shapes
    ]


def adamw(named: list) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=0.01)


@dataclass
class Case:
    schedule: str
    num_microbatches: int
    layers: Callable[[], list[nn.Module]]
    shapes: list[tuple[int, ...]]
    loss_fn: Callable[[Tensor, Tensor], Tensor] = nn.functional.mse_loss
    optimizer: Callable[[list], torch.optim.Optimizer] = adamw
    dp: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    def data(self) -> list[tuple[Tensor, Tensor]]:
        return batches(*self.shapes)


CHANGING = [(11, 2, 6), (11, 2, 6), (8, 2, 6), (11, 2, 6), (5, 2, 6), (12, 2, 6)]

OF_THREE = {
    "2bw m=4": Case("2bw", 4, plain_layers, CHANGING),
    "2bw m=2": Case("2bw", 2, plain_layers, CHANGING),
    "1f1b m=4": Case("1f1b", 4, plain_layers, CHANGING),
    "gpipe m=3": Case("gpipe", 3, plain_layers, CHANGING),
    "no-pipeline m=1": Case("no-pipeline", 1, plain_layers, CHANGING),
    "weight-stashing m=2": Case("weight-stashing", 2, plain_layers, CHANGING),
    "2bw-fresh m=4, look-ahead, flushed start": Case(
        "2bw-fresh", 4, plain_layers, CHANGING, options={"lookahead": 1.0, "flush_batches": 2}
    ),
    "paci m=4": Case("paci", 4, plain_layers, CHANGING),
    "channels last": Case("2bw", 2, image_layers, [(5, 3, 5, 5)] * 3),
    "tuples": Case("2bw", 2, mixed_layers, [(5, 4), (5, 4), (6, 4), (5, 4)]),
}


def tied_layers() -> list[nn.Module]:
    torch.manual_seed(3)
    layers = [nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)]
    layers[2].weight = layers[0].weight
    layers[3].weight = layers[0].weight
    return layers


def momentum(named: list) -> torch.optim.Optimizer:
    """Less touchy than AdamW about the order in which gradients are added."""
    return torch.optim.SGD(named, lr=0.02, momentum=0.9)


def sum_and_weight(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Squared error over the targets above -0.5, which fall unevenly."""
    counts = target > -0.5
    return ((output - target).square() * counts).sum(), counts.sum()


ROWS = [(12, 4), (12, 4), (11, 4), (12, 4), (13, 4)]
CLIP = {"max_grad_norm": 0.5}

OF_FOUR = {
    "tied, clipped, 4x1": Case("2bw", 4, tied_layers, ROWS, optimizer=momentum, options=CLIP),
    "2x2": Case("2bw", 2, tied_layers, ROWS, optimizer=momentum, dp=2),
    "1x4": Case("1f1b", 2, tied_layers, ROWS, optimizer=momentum, dp=4),
    "2x2, tied, clipped, sharded, recomputed": Case(
        "2bw",
        2,
        tied_layers,
        ROWS,
        optimizer=momentum,
        dp=2,
        options={**CLIP, "shard_optimizer": True, "recompute": "layer"},
    ),
    "2x2, stages are neighbours": Case(
        "2bw",
        2,
        tied_layers,
        ROWS,
        optimizer=momentum,
        dp=2,
        options={**CLIP, "shard_optimizer": True, "placement": "pipelines"},
    ),
    "2x2, sums and weights, gpipe": Case(
        "gpipe", 2, tied_layers, ROWS, sum_and_weight, momentum, dp=2
    ),
}
