"""A stage: its layers' forward and backward, and the stash of what is in flight between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from twobw.runtime.finiteness import FiniteWatch
from twobw.runtime.messages import Message, Value, as_value, check_value
from twobw.runtime.randomness import LayerRunner
from twobw.runtime.recompute import BufferKeeper, Buffers, recompute_attention

Recompute = Literal["none", "layer", "stage", "attention"]


class _Received:
    """Catches the gradients of what a segment has received."""

    def __init__(self) -> None:
        self.gradients: tuple[Tensor | None, ...] = ()


@dataclass(frozen=True, slots=True)
class _Graph:
    """A segment whose graph is kept: where gradients enter it, and where they come out.

    The outputs themselves are not kept: an edge is enough, and their storage goes when sent.
    """

    edges: list[GradientEdge]
    received: _Received


@dataclass(frozen=True, slots=True)
class _Inputs:
    """A segment that is run again for its backward: what it was run on.

    Attributes:
        layers: places of its layers in the stage.
        message: what the first of them was given.
        buffers: those of the layers as they were before.
        batch: for the random generator.
        place: likewise.
    """

    layers: range
    message: Message
    buffers: Buffers
    batch: int
    place: int


class Stage:
    """The layers of one stage.

    Args:
        layers: the stage's modules, in order.
        first_layer: place of the first of them in the unsplit model.
        runner: sets the random generator before each layer.
        recompute: what is run again for the backward instead of being kept: nothing; each layer
            from its inputs; the whole stage from its inputs; or modules that are attention.
        watch: is given what layers give in training, when they first run.

    Raises:
        ValueError: an unknown ``recompute``.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        first_layer: int,
        runner: LayerRunner,
        recompute: str = "none",
        watch: FiniteWatch | None = None,
    ) -> None:
        if recompute not in get_args(Recompute):
            allowed = ", ".join(get_args(Recompute))
            raise ValueError(f"recompute = {recompute!r} is not one of {allowed}")
        self.layers = list(layers)
        self.first_layer = first_layer
        self._runner = runner
        self._recompute = recompute
        self._watch = watch
        if recompute == "attention":
            recompute_attention(self.layers)
        together = [self.layers] if recompute == "stage" else [[layer] for layer in self.layers]
        self._keepers = [BufferKeeper(layers) for layers in together]
        self._stash: dict[int, list[_Graph | _Inputs]] = {}
        self._token = torch.zeros((), requires_grad=True)

    def forward(
        self,
        microbatch: int,
        *,
        batch: int,
        place: int,
        value: Value | Message,
        then: Callable[[Value], Value] | None = None,
    ) -> Value | Message:
        """Run the layers, then ``then`` (the loss, on the last stage); keep what the backward
        needs, where gradients are recorded.

        Args:
            microbatch: under this number `backward` finds it again.
            batch: 0-based, for the random generator.
            place: of the microbatch in the global batch, for the random generator.
            value: the first stage's input, or what was received.
            then: applied to the last layer's output; never run twice.

        Raises:
            TypeError: a layer gives something else than a tensor or a tuple of tensors.
        """
        stash: list[_Graph | _Inputs] = []
        everything = range(len(self.layers))

        def run_last(value: Value) -> Value:
            if then is None:
                return value
            index = self.first_layer + len(self.layers)
            loss = self._runner.run(then, index, batch, place, value)
            self._look_at(loss, index, batch, place)
            return loss

        if self._recompute in ("layer", "stage") and torch.is_grad_enabled():
            value = self._run_and_forget(value, batch, place, stash)
            if then is not None:
                value = self._run_and_keep(value, run_last, stash)
        else:

            def run(value: Value) -> Value:
                return run_last(self._run_layers(everything, value, batch, place))

            value = self._run_and_keep(value, run, stash)
        if torch.is_grad_enabled():
            self._stash[microbatch] = stash
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
        for segment in reversed(self._stash.pop(microbatch)):
            if isinstance(segment, _Graph):
                graph = segment
            elif gradients is None or any(gradient is not None for gradient in gradients):
                graph = self._run_again(segment)
            else:
                gradients = (None,) * len(segment.message.wanting)
                continue
            with self._runner.backward():
                gradients = _backward(graph, gradients)
        assert gradients is not None, "a stage has a segment"
        return tuple(gradients)

    def tensors(self) -> dict[str, Tensor]:
        """What the layers' state dicts have, the tensors themselves, by their names in the unsplit
        model."""
        return {
            f"{number}.{name}": tensor
            for number, layer in enumerate(self.layers, self.first_layer)
            for name, tensor in layer.state_dict(keep_vars=True).items()
        }

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Eval mode and no gradients while open; every module's mode is restored after."""
        modes = {m: m.training for layer in self.layers for m in layer.modules()}
        for layer in self.layers:
            layer.eval()
        with torch.no_grad():
            yield
        for module, training in modes.items():
            module.training = training

    def _run_layers(
        self, places: range, value: Value, batch: int, place: int, *, is_again: bool = False
    ) -> Value:
        for offset in places:
            index, layer = self.first_layer + offset, self.layers[offset]
            try:
                output = self._runner.run(layer, index, batch, place, value)
            except Exception as error:
                error.add_note(f"in {self._name(offset)}, {self._given(offset, value)}")
                raise
            value = check_value(output, self._name(offset))
            if not is_again:
                self._look_at(value, index, batch, place)
        return value

    def _look_at(self, value: Value, index: int, batch: int, place: int) -> None:
        if self._watch is not None and torch.is_grad_enabled():
            self._watch.add(value, index, batch, place)

    def _name(self, offset: int) -> str:
        return f"layer {self.first_layer + offset} ({type(self.layers[offset]).__name__})"

    def _given(self, offset: int, value: Value) -> str:
        """What a layer was given, and by which."""
        index = self.first_layer + offset
        giver = "the batch" if index == 0 else f"layer {index - 1}, on the stage before"
        if offset > 0:
            giver = self._name(offset - 1)
        return f"which was given {Message.of(value).layout} by {giver}"

    def _run_and_keep(
        self,
        value: Value | Message,
        function: Callable[[Value], Value],
        stash: list[_Graph | _Inputs],
    ) -> Value:
        """One segment whose graph is kept."""
        received = _Received()
        if isinstance(value, Message):
            entered = self._enter(value, received)
            before = _versions(entered)
            given = function(entered)
            self._check_shared(value, before, _versions(entered))
        else:
            given = function(value)
        if torch.is_grad_enabled():
            stash.append(_Graph(_edges(given), received))
        return given

    def _run_and_forget(
        self, value: Value | Message, batch: int, place: int, stash: list[_Graph | _Inputs]
    ) -> Message:
        """Segments of which only the inputs are kept. Layers run one by one with gradients
        recorded, to see which outputs require one, and each graph goes with its outputs."""
        message = value if isinstance(value, Message) else Message.of(value)
        everything = range(len(self.layers))
        if self._recompute == "stage":
            stash.append(_Inputs(everything, message, self._keepers[0].keep(), batch, place))
        for offset in everything:
            if self._recompute == "layer":
                layers = range(offset, offset + 1)
                buffers = self._keepers[offset].keep()
                stash.append(_Inputs(layers, message, buffers, batch, place))
            message = self._run_one(offset, message, batch, place)
        return message

    def _run_one(self, offset: int, message: Message, batch: int, place: int) -> Message:
        """One layer. It may work in place on what it is given, at times or always: it gets a copy,
        so that what is kept stays as it was."""
        entered = self._enter(message.copy(), _Received())
        before = _versions(entered)
        value = self._run_layers(range(offset, offset + 1), entered, batch, place)
        self._check_shared(message, before, _versions(entered), offset)
        return Message.of(value)

    def _check_shared(
        self, message: Message, before: list[int], after: list[int], offset: int = 0
    ) -> None:
        """Refuse what autograd does not see across a border: that a tensor changes with another.

        Raises:
            RuntimeError: tensors that share memory were changed in place.
        """
        layouts = [layout for layout in message.layout.tensors if layout is not None]
        for layout, old, new in zip(layouts, before, after, strict=True):
            if layout.shares_memory and new != old:
                raise RuntimeError(
                    f"layer {self.first_layer + offset} or one after it works in place on a tensor "
                    "that shares memory with another that the layer before it gave; change a "
                    "clone() instead"
                )

    def _run_again(self, segment: _Inputs) -> _Graph:
        """A segment's graph, from its inputs."""
        received = _Received()
        with segment.buffers.in_place():
            value = self._enter(segment.message.copy(), received)
            value = self._run_layers(
                segment.layers, value, segment.batch, segment.place, is_again=True
            )
        return _Graph(_edges(value), received)

    def _enter(self, message: Message, received: _Received) -> Value:
        """What a layer is given of a message; its gradients end up in ``received``."""
        tensors = list(message.tensors)
        wanting = message.wanting
        received.gradients = (None,) * len(wanting)
        if wanting and torch.is_grad_enabled():
            entered = _Receive.apply(  # type: ignore[no-untyped-call]
                self._token, received, *(tensors[index] for index in wanting)
            )
            for index, tensor in zip(wanting, entered, strict=True):
                tensors[index] = tensor
        return as_value(tensors, is_tuple=message.layout.is_tuple)


class _Receive(torch.autograd.Function):
    """Brings received tensors into a graph.

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


def _versions(value: Value) -> list[int]:
    """How often each tensor has been changed in place."""
    tensors = value if isinstance(value, tuple) else (value,)
    return [tensor._version for tensor in tensors if tensor is not None]


def _edges(value: Value) -> list[GradientEdge]:
    tensors = value if isinstance(value, tuple) else (value,)
    return [get_gradient_edge(t) for t in tensors if t is not None and t.requires_grad]


def _backward(
    graph: _Graph, gradients: Sequence[Tensor | None] | None
) -> tuple[Tensor | None, ...]:
    edges, starts = graph.edges, None
    if gradients is not None:
        pairs = [(e, g) for e, g in zip(edges, gradients, strict=True) if g is not None]
        edges, starts = [edge for edge, _ in pairs], [gradient for _, gradient in pairs]
    if edges:
        torch.autograd.backward(edges, starts)
    return graph.received.gradients
