"""A schedule's version rule played in one process on one thread, as fast as plain training.

A pipeline's result depends on its versions alone, not on time: which weights each forward and
backward of each stage runs on. `Emulator` plays the ops of a schedule's own programs, stage by
stage on one copy of the model, to the bit as `twobw.Pipeline` would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from twobw.core.generators import stage_program
from twobw.core.ops import Op, OpKind
from twobw.core.replay import Event, data_source, event, replay
from twobw.runtime.layers import Layer, build_layers, choose_split, find_ties
from twobw.runtime.optimization import OptimizerFactory, SchedulerFactory
from twobw.runtime.randomness import seed_layer

Value: TypeAlias = Tensor | tuple[Tensor | None, ...]
Gradients: TypeAlias = list[Tensor | None]
Correction: TypeAlias = Callable[[Gradients, Sequence[Tensor], Sequence[Tensor], float], None]
"""Changes, in place, what an optimizer is given: gradients, the newest weights, those one version
older, and the share of the microbatches whose forward ran on the older ones."""


@dataclass
class Batch:
    """One batch: its microbatches, and what has come of them."""

    number: int
    inputs: list[Value]
    targets: list[Value]
    sizes: list[int]
    loss: float = 0.0
    weight: float | None = None

    def share(self, place: int) -> float:
        return self.sizes[place] / sum(self.sizes)


@dataclass
class Stage:
    """One stage: its part of the model, and the versions of its weights.

    The layers have one set of Parameters. A version is copied into them where it is needed;
    autograd saves weights by reference, so a backward uses what stands there then.
    """

    first_layer: int
    layers: list[nn.Module]
    parameters: list[nn.Parameter]
    masters: list[nn.Parameter]
    optimizers: list[Optimizer]
    schedulers: list[LRScheduler]
    versions: dict[tuple[int, bool], list[Tensor]] = field(default_factory=dict)
    installed: tuple[int, bool] = (-1, False)
    newest: int = 0
    num_kept: int = 2
    stash: dict[int, tuple[Value, Value]] = field(default_factory=dict)
    gradients: dict[int, Gradients] = field(default_factory=dict)
    num_stale: dict[int, int] = field(default_factory=dict)

    def start(self, num_slots: int) -> None:
        """Make the newest weights version 0. One older version is kept for a `Correction`."""
        self.newest, self.num_kept, self.installed = 0, max(num_slots, 2), (-1, False)
        self.versions = {(0, ahead): _copies(self.masters) for ahead in (False, True)}

    def install(self, version: int, *, ahead: bool) -> None:
        if self.installed != (version, ahead):
            self.write(self.versions[version, ahead])
            self.installed = version, ahead

    def write(self, weights: list[Tensor]) -> None:
        if weights:
            torch._foreach_copy_([parameter.data for parameter in self.parameters], weights)

    def update(self, gradients: Gradients, lookahead: float) -> None:
        """Step to the next version, and to its extrapolation W + a (W - W before)."""
        before = _copies(self.masters) if lookahead else []
        for parameter, gradient in zip(self.masters, gradients, strict=True):
            parameter.grad = gradient
        for optimizer in self.optimizers:
            optimizer.step()
        for parameter in self.masters:
            parameter.grad = None
        self.newest += 1
        self.versions[self.newest, False] = _copies(self.masters)
        if lookahead:
            for old, new in zip(before, self.masters, strict=True):
                old.mul_(-lookahead).add_(new.detach(), alpha=1 + lookahead)
            self.versions[self.newest, True] = before
        for ahead in (False, True):
            self.versions.pop((self.newest - self.num_kept, ahead), None)


class Emulator:
    """Trains as `twobw.Pipeline` with the same arguments would.

    Args:
        layers: as for `Pipeline`; no parameter may be on two stages. Modules are trained in place.
        loss_fn: as for `Pipeline`.
        optimizer: as for `Pipeline`.
        schedule: any of the registry.
        num_microbatches: of a batch.
        split: as for `Pipeline`.
        pp: number of stages.
        options: of the schedule.
        seed: as for `Pipeline`.
        lr_scheduler: as for `Pipeline`.
        max_grad_norm: as for `Pipeline`; an update then waits for the batch's last backward.
        lookahead: the ``a`` of W + a (W - W before), on which ops run whose version is older than
            the one that their gradient is applied to.
        flush_batches: so many batches first, by ``1f1b``.
        correction: changes what the optimizers are given.

    Attributes:
        losses: the mean loss of each batch whose last forward is over.

    Raises:
        ValueError: what the schedule's generator refuses, or a parameter that two stages have.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        loss_fn: Callable[[Any, Any], Any],
        optimizer: OptimizerFactory,
        schedule: str = "2bw",
        num_microbatches: int = 4,
        split: Sequence[int] | None = None,
        pp: int = 2,
        *,
        options: dict[str, int] | None = None,
        seed: int = 0,
        lr_scheduler: SchedulerFactory | None = None,
        max_grad_norm: float | None = None,
        lookahead: float = 0.0,
        flush_batches: int = 0,
        correction: Correction | None = None,
    ) -> None:
        self.losses: list[float] = []
        self._loss_fn = loss_fn
        self._seed = seed
        self._max_grad_norm = max_grad_norm
        self._lookahead = lookahead
        self._correction = correction
        self._schedule = schedule, num_microbatches, options or {}
        self._num_flushed = flush_batches
        counts = choose_split(layers, split, pp)
        if find_ties(layers, counts):
            raise ValueError("a parameter is on two stages; the emulator has no tied weights")
        modules = build_layers(layers, 0, seed)
        self._num_layers = len(modules)
        self._stages = [
            _stage(modules, sum(counts[:s]), counts[s], optimizer, lr_scheduler) for s in range(pp)
        ]
        self._next_batch = 0
        if flush_batches:
            self.set_schedule("1f1b")
        else:
            self.set_schedule(schedule, **(options or {}))

    def set_schedule(self, schedule: str, **options: int) -> None:
        """Drain, and go on with another schedule from its version 0 on."""
        if self._next_batch:
            self.drain()
        p, m = len(self._stages), self._schedule[1]
        self._programs = [stage_program(schedule, s, p, m, **options) for s in range(p)]
        self._per_update = self._programs[0].rule.microbatches_per_update
        for stage, program in zip(self._stages, self._programs, strict=True):
            stage.start(program.rule.num_versions)
        self._origin = self._next_batch
        self._batches: dict[int, Batch] = {}
        self._pending: list[list[Op]] = [[] for _ in self._stages]
        self._happened: set[Event] = set()
        self._passed: dict[Event, Any] = {}
        self._num_clipped = 0

    def train_step(self, inputs: Value, targets: Value) -> None:
        """One batch, as far as `Pipeline.train_step` goes on every stage."""
        if self._num_flushed and self._next_batch == self._num_flushed:
            self.set_schedule(self._schedule[0], **self._schedule[2])
        m = self._schedule[1]
        xs, ys = _split(inputs, m), _split(targets, m)
        sizes = [len(_tensors(x)[0]) for x in xs]
        batch = Batch(self._next_batch, xs, ys, sizes)
        self._batches[self._next_batch - self._origin] = batch
        self._next_batch += 1
        self._run([list(program.begin_batch()) for program in self._programs])

    def drain(self) -> None:
        """Finish what is in flight."""
        self._run([list(program.drain()) for program in self._programs])
        assert not any(self._pending), "a checked schedule ends"

    def evaluate(self, batches: Iterable[tuple[Value, Value]], *, ahead: bool = False) -> float:
        """The mean loss on the newest weights (``ahead``: on their extrapolation) in eval mode;
        drains first."""
        self.drain()
        losses = []
        with _evaluating(self._stages), torch.no_grad():
            for stage in self._stages:
                stage.install(stage.newest, ahead=ahead and self._lookahead > 0)
            for inputs, targets in batches:
                value = inputs
                for stage in self._stages:
                    for layer in stage.layers:
                        value = layer(value)
                result = self._loss_fn(value, targets)
                total, weight = result if isinstance(result, tuple) else (result, 1.0)
                losses.append(float(total) / float(weight))
        return sum(losses) / len(losses)

    def state_dict(self) -> dict[str, Tensor]:
        """As `Pipeline.full_state_dict`; drains first."""
        self.drain()
        for stage in self._stages:
            stage.install(stage.newest, ahead=False)
        layers = [layer for stage in self._stages for layer in stage.layers]
        return {name: t.clone() for name, t in nn.Sequential(*layers).state_dict().items()}

    def _run(self, programs: list[list[Op]]) -> None:
        """Run what can run; the rest waits for the next batch's ops."""
        handlers = {
            OpKind.FORWARD: self._forward,
            OpKind.BACKWARD: self._backward,
            OpKind.UPDATE: self._update,
        }
        ops = [[*left, *more] for left, more in zip(self._pending, programs, strict=True)]
        reached = [0] * len(ops)
        with torch.random.fork_rng(devices=[]):
            for rank, index in replay(ops, self._awaited):
                op = ops[rank][index]
                handlers[op.kind](op)
                self._happened.add(event(op))
                reached[rank] = index + 1
        self._pending = [program[end:] for program, end in zip(ops, reached, strict=True)]

    def _awaited(self, op: Op) -> Event | None:
        needs = data_source(op, len(self._stages))
        if op.kind is OpKind.UPDATE and self._max_grad_norm is not None and op.stage > 0:
            needs = OpKind.BACKWARD, 0, op.microbatch  # the last of all that the norm is over
        return None if needs in self._happened else needs

    def _install(self, op: Op) -> Stage:
        stage = self._stages[op.stage]
        is_stale = op.version < op.microbatch // self._per_update
        stage.install(op.version, ahead=is_stale and self._lookahead > 0)
        return stage

    def _forward(self, op: Op) -> None:
        stage, batch = self._install(op), self._batches[op.batch]
        place = op.microbatch % len(batch.sizes)
        source = data_source(op, len(self._stages))
        entered = batch.inputs[place] if source is None else _entering(self._passed.pop(source))
        value = entered
        for index, layer in enumerate(stage.layers, stage.first_layer):
            seed_layer(self._seed, batch.number, place, index)
            value = layer(value)
        if op.stage == len(self._stages) - 1:
            seed_layer(self._seed, batch.number, place, self._num_layers)
            value = self._loss(batch, place, self._loss_fn(value, batch.targets[place]))
            if place == len(batch.sizes) - 1:
                self.losses.append(batch.loss / (batch.weight or 1.0))
        else:
            self._passed[event(op)] = value
        stage.stash[op.microbatch] = entered, value
        made = op.microbatch // self._per_update + 1
        is_stale = op.version < made - 1
        stage.num_stale[made] = stage.num_stale.get(made, 0) + is_stale

    def _loss(self, batch: Batch, place: int, result: Tensor | tuple[Tensor, Any]) -> Tensor:
        """The loss as its backward starts from it; sums are divided when their weight is known."""
        if isinstance(result, Tensor):
            batch.loss += (result.detach().double() * batch.share(place)).item()
            return result if self._per_update == 1 else result * batch.share(place)
        loss, weight = result[0], float(result[1])
        batch.loss += loss.detach().double().item()
        batch.weight = (batch.weight or 0.0) + weight
        return loss / weight if self._per_update == 1 and weight else loss

    def _backward(self, op: Op) -> None:
        stage = self._install(op)
        entered, left = stage.stash.pop(op.microbatch)
        outputs = [t for t in _tensors(left) if t.requires_grad]
        source = data_source(op, len(self._stages))
        gradients: list[Tensor] | None = None
        if source is not None:
            given: Gradients = self._passed.pop(source)
            outputs = [t for t, g in zip(outputs, given, strict=True) if g is not None]
            gradients = _present(given)
        if outputs:
            torch.autograd.backward(outputs, gradients)
        if op.stage > 0:
            self._passed[event(op)] = [t.grad for t in _tensors(entered) if t.requires_grad]
        if (op.microbatch + 1) % self._per_update == 0:
            made = (op.microbatch + 1) // self._per_update
            stage.gradients[made] = [parameter.grad for parameter in stage.parameters]
            for parameter in stage.parameters:
                parameter.grad = None
            weight = self._batches[op.batch].weight
            if weight and self._per_update > 1:
                for gradient in _present(stage.gradients[made]):
                    gradient.div_(weight)

    def _update(self, op: Op) -> None:
        stage = self._stages[op.stage]
        if self._max_grad_norm is not None and op.version > self._num_clipped:
            self._clip(op.version, self._max_grad_norm)
            self._num_clipped = op.version
        gradients, stale = stage.gradients.pop(op.version), stage.num_stale.pop(op.version)
        if self._correction is not None and stale:
            older = stage.versions[max(stage.newest - 1, 0), self._lookahead > 0]
            self._correction(gradients, stage.masters, older, stale / self._per_update)
        stage.update(gradients, self._lookahead)
        if (op.microbatch + 1) % self._schedule[1] == 0:
            for scheduler in stage.schedulers:
                scheduler.step()

    def _clip(self, version: int, max_norm: float) -> None:
        """As ``torch.nn.utils.clip_grad_norm_`` on the whole model, when the last gradient is
        there."""
        gradients = [g for stage in self._stages for g in _present(stage.gradients[version])]
        norms = [torch.linalg.vector_norm(gradient) for gradient in gradients]
        total = torch.linalg.vector_norm(torch.stack(norms))
        torch._foreach_mul_(gradients, torch.clamp(max_norm / (total + 1e-6), max=1.0))


def delay_compensation(strength: float) -> Correction:
    """The gradient at W to first order, g + strength g g (W - W used), as far as it is stale
    (DC-ASGD: Zheng et al., 2017, arXiv 1609.08326)."""

    def correct(
        gradients: Gradients, newest: Sequence[Tensor], older: Sequence[Tensor], share: float
    ) -> None:
        for gradient, new, old in zip(gradients, newest, older, strict=True):
            if gradient is not None:
                moved = new.detach() - old
                gradient.addcmul_(gradient * gradient, moved, value=strength * share)

    return correct


def _stage(
    modules: list[nn.Module],
    first_layer: int,
    num_layers: int,
    optimizer: OptimizerFactory,
    lr_scheduler: SchedulerFactory | None,
) -> Stage:
    layers = modules[first_layer : first_layer + num_layers]
    names: dict[nn.Parameter, str] = {}
    for index, layer in enumerate(layers, first_layer):
        for name, parameter in layer.named_parameters():
            if parameter.requires_grad:
                names.setdefault(parameter, f"{index}.{name}")
    masters = [nn.Parameter(parameter.detach().clone()) for parameter in names]
    named = list(zip(names.values(), masters, strict=True))
    made = optimizer(named) if named else []
    optimizers = [made] if isinstance(made, Optimizer) else list(made)
    schedulers = [lr_scheduler(one) for one in optimizers] if lr_scheduler else []
    return Stage(first_layer, layers, list(names), masters, optimizers, schedulers)


def _copies(weights: Sequence[Tensor]) -> list[Tensor]:
    return [weight.detach().clone() for weight in weights]


def _present(gradients: Gradients) -> list[Tensor]:
    return [gradient for gradient in gradients if gradient is not None]


def _tensors(value: Value) -> list[Tensor]:
    return [t for t in (value if isinstance(value, tuple) else (value,)) if t is not None]


def _map(function: Callable[[Tensor], Tensor], value: Value) -> Value:
    if isinstance(value, tuple):
        return tuple(None if t is None else function(t) for t in value)
    return function(value)


def _split(value: Value, num_parts: int) -> list[Value]:
    """Along the samples."""
    cut = [t.tensor_split(num_parts) for t in _tensors(value)]
    return [_with(value, pieces) for pieces in zip(*cut, strict=True)]


def _with(value: Value, tensors: Sequence[Tensor]) -> Value:
    """``value`` with these tensors instead."""
    left = iter(tensors)
    return _map(lambda _: next(left), value)


def _entering(value: Value) -> Value:
    """What the stage before gave, as leaves of this stage's graph."""
    return _map(lambda t: t.detach().requires_grad_(t.requires_grad), value)


@contextmanager
def _evaluating(stages: list[Stage]) -> Iterator[None]:
    modes = {m: m.training for stage in stages for layer in stage.layers for m in layer.modules()}
    for module in modes:
        module.training = False
    yield
    for module, training in modes.items():
        module.training = training
