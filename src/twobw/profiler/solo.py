"""`SoloLayer`: one layer as a rank has it, but alone in its stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from twobw.config import Config
from twobw.models.whole import model_loss
from twobw.runtime.messages import Layout, Message, Value
from twobw.runtime.optimization import Optimization
from twobw.runtime.precision import cast, cast_rest, compute_dtype
from twobw.runtime.randomness import LayerRunner
from twobw.runtime.stage import Stage
from twobw.runtime.weights import VersionedWeights
from twobw.training.optimizer import make_optimizer

Given: TypeAlias = Value | Message
"""What a stage runs on: part of a batch, or what another stage has sent."""


class SoloLayer:
    """One layer in a stage of its own, with weight versions, gradients and optimizer.

    Args:
        module: the layer.
        number: its place in the model.
        config: precision, recompute and optimizer.
        device: where the layer is.

    Attributes:
        module: the layer.
        weights: its versions.
        optimization: its optimizers.
        is_loss: whether its backward starts from what it gives.
    """

    def __init__(
        self, module: nn.Module, number: int, config: Config, device: torch.device
    ) -> None:
        training = config.training
        dtype = compute_dtype(training.precision)
        if dtype != torch.float32:
            cast_rest([module], dtype)
        self.module = module
        self._device = device
        self.is_loss = isinstance(module, Loss)
        runner = LayerRunner(training.seed, None)
        recompute = "attention" if training.recompute == "attention" else "none"
        self._stage = Stage([module], number, runner, recompute)
        self._stage_again = Stage([module], number, runner, "layer")
        self.weights = VersionedWeights([(str(number), module)], 2, dtype)
        self.optimization = Optimization(
            self.weights.optimizer_parameters(), make_optimizer(config.optimizer), None
        )
        self._gradients: list[Tensor | None] = [None] * len(self.weights.names)

    def forward(self, microbatch: int, given: Given, *, again: bool = False) -> Message:
        """A forward.

        Args:
            microbatch: under this number `backward` finds it.
            given: what the layer runs on.
            again: whether the backward will run it once more, from its input.
        """
        stage = self._stage_again if again else self._stage
        value = stage.forward(microbatch, batch=0, place=microbatch, value=given)
        return value if isinstance(value, Message) else Message.of(value)

    def backward(
        self, microbatch: int, gradients: Sequence[Tensor] | None, *, again: bool = False
    ) -> None:
        """A backward; gradients of parameters are added to those that there are.

        Args:
            microbatch: as given to `forward`.
            gradients: as `output_gradients` gives.
            again: as given to `forward`.
        """
        stage = self._stage_again if again else self._stage
        with self.weights.accumulate(self._gradients):
            stage.backward(microbatch, gradients)

    def output_gradients(self, layout: Layout) -> list[Tensor] | None:
        """Gradients, all ones, of those tensors of an output that want one; the loss is given
        none."""
        if self.is_loss:
            return None
        wanting = [t for t in layout.tensors if t is not None and t.requires_grad]
        return [tensor.empty(self._device).fill_(1.0) for tensor in wanting]

    def update(self) -> None:
        """An update with the gradients there are, which are then no more."""
        gradients = self._gradients
        self._gradients = [None] * len(gradients)
        self.weights.update(gradients, self.optimization.step)
        self.weights.install(self.weights.newest)


class Loss(nn.Module):
    """The loss of a config's model as a layer: what the last one gives to a scalar, scaled by a
    microbatch's share of its batch, as on the last stage.

    Args:
        config: the model, and the precision.
        targets: for the largest microbatch; smaller ones take the first of them.
    """

    def __init__(self, config: Config, targets: Tensor) -> None:
        super().__init__()
        self._function = model_loss(config.model.size())
        self._is_mixed = config.training.precision != "fp32"
        self._targets = targets  # no buffer: a stage is given them

    def forward(self, output: Tensor) -> Tensor:
        """The loss."""
        if self._is_mixed:
            output = cast(output, torch.float32)  # type: ignore[assignment]
        result = self._function(output, self._targets[: output.shape[0]])
        loss = result[0] if isinstance(result, tuple) else result
        return loss * 0.5
