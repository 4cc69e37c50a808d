"""A stage: its layers' forward and backward, and the stash of what is in flight between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from twobw.runtime.messages import Message, Value, as_value, check_value
from twobw.runtime.randomness import LayerRunner


class _Received:
    """Catches the gradients of what a stage has received."""

    def __init__(self) -> None:
        self.gradients: tuple[Tensor | None, ...] = ()


@dataclass(frozen=True, slots=True)
class _Stash:
    """What a backward needs: where gradients enter the graph, and where they come out.

    The outputs themselves are not kept: an edge is enough, and their storage goes when sent.
    """

    edges: list[GradientEdge]
    received: _Received


class _Receive(torch.autograd.Function):
    """Brings received tensors into a stage's graph.

    Unlike a leaf, the result may be changed in place by the first layer, as it may be within an
    unsplit model; and an unused one has the gradient ``None``, not zeros.
    """

    @staticmethod
    def forward(ctx: Any, token: Tensor, received: _Received, *tensors: Tensor) -> Any:
        ctx.received = received
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.received.gradients = gradients
        return (None,) * (2 + len(gradients))


class Stage:
    """The layers of one stage.

    Args:
        layers: the stage's modules, in order.
        first_layer: place of the first of them in the unsplit model.
        runner: sets the random generator before each layer.
    """

    def __init__(self, layers: Sequence[nn.Module], first_layer: int, runner: LayerRunner) -> None:
        self.layers = list(layers)
        self.first_layer = first_layer
        self._runner = runner
        self._stash: dict[int, _Stash] = {}
        self._token = torch.zeros((), requires_grad=True)

    @property
    def num_in_flight(self) -> int:
        """Microbatches between their forward and backward."""
        return len(self._stash)

    def forward(
        self,
        microbatch: int,
        *,
        batch: int,
        place: int,
        value: Value | Message,
        then: Callable[[Value], Value] | None = None,
    ) -> Value:
        """Run the layers, then ``then`` (the loss, on the last stage); keep what the backward
        needs, where gradients are recorded.

        Args:
            microbatch: under this number `backward` finds it again.
            batch: 0-based, for the random generator.
            place: of the microbatch in the global batch, for the random generator.
            value: the first stage's input, or what was received.
            then: applied to the last layer's output.

        Raises:
            TypeError: a layer gives something else than a tensor or a tuple of tensors.
        """
        received = _Received()
        if isinstance(value, Message):
            value = self._enter(value, received)
        for index, layer in enumerate(self.layers, self.first_layer):
            output = self._runner.run(layer, index, batch, place, value)
            value = check_value(output, f"layer {index} ({type(layer).__name__})")
        if then is not None:
            value = then(value)
        if torch.is_grad_enabled():
            tensors = value if isinstance(value, tuple) else (value,)
            edges = [get_gradient_edge(t) for t in tensors if t is not None and t.requires_grad]
            self._stash[microbatch] = _Stash(edges, received)
        return value

    def backward(
        self, microbatch: int, gradients: Sequence[Tensor | None] | None
    ) -> tuple[Tensor | None, ...]:
        """Backward of one microbatch.

        Args:
            microbatch: as given to `forward`.
            gradients: of those outputs that require one, in order; ``None`` where the output is
                the loss.

        Returns:
            The gradients of those received tensors that require one, in order; ``None`` for a
            tensor that the outputs do not depend on.
        """
        stash = self._stash.pop(microbatch)
        edges, starts = stash.edges, None
        if gradients is not None:
            pairs = [(e, g) for e, g in zip(edges, gradients, strict=True) if g is not None]
            edges, starts = [edge for edge, _ in pairs], [gradient for _, gradient in pairs]
        if edges:
            torch.autograd.backward(edges, starts)
        return stash.received.gradients

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Eval mode and no gradients while open; every module's mode is restored after."""
        modules = {module for layer in self.layers for module in layer.modules()}
        modes = {module: module.training for module in modules}
        for layer in self.layers:
            layer.eval()
        with torch.no_grad():
            yield
        for module, training in modes.items():
            module.training = training

    def _enter(self, message: Message, received: _Received) -> Value:
        tensors = list(message.tensors)
        wanting = [
            index
            for index, layout in enumerate(message.layout.tensors)
            if layout is not None and layout.requires_grad
        ]
        if wanting and torch.is_grad_enabled():
            received.gradients = (None,) * len(wanting)
            entered = _Receive.apply(  # type: ignore[no-untyped-call]
                self._token, received, *(tensors[index] for index in wanting)
            )
            for index, tensor in zip(wanting, entered, strict=True):
                tensors[index] = tensor
        return as_value(tensors, is_tuple=message.layout.is_tuple)
