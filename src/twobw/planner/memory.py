"""The memory of one stage at its peak, every term by name (Narayanan et al., 2021,
section 4.3, and what the paper leaves out). The only place where it is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from twobw.planner.configuration import Configuration, Recompute, Training, defers_updates
from twobw.profiler.profile import MicrobatchProfile, ModelProfile

Bytes = npt.NDArray[np.int64]
Number = TypeVar("Number", int, npt.NDArray[np.int64])

BUCKET_BYTES = 25 * 2**20
"""Gradients are summed over replicas in flat copies of at most so much."""

MESSAGES_AHEAD = 2
"""Messages of each kind that a rank has room for before it takes them."""


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of one stage on one device, at its peak.

    Attributes:
        weights: one version, in the dtype that is computed in.
        older_versions: the further versions that the schedule keeps.
        lookahead: the weights that are not extrapolated, beside those that are.
        main_weights: the optimizer's own fp32 copy, in mixed precision.
        gradients: one gradient.
        second_gradients: of the next batch, while an update waits for its reduction.
        optimizer: its state.
        buffers: what is not trained.
        activations: what microbatches in flight keep for their backward.
        logits: likewise, of the loss.
        workspace: the most that a forward or backward needs besides.
        communication: messages on their way, and the flat copy that replicas sum.
    """

    weights: int = 0
    older_versions: int = 0
    lookahead: int = 0
    main_weights: int = 0
    gradients: int = 0
    second_gradients: int = 0
    optimizer: int = 0
    buffers: int = 0
    activations: int = 0
    logits: int = 0
    workspace: int = 0
    communication: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.by_kind().values())

    def by_kind(self) -> dict[str, int]:
        """Bytes by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True)
class Stash:
    """What one microbatch needs on one stage.

    Attributes:
        kept_bytes: from its forward to its backward, but for the loss.
        loss_bytes: likewise, for the loss.
        workspace_bytes: the most that its forward or its backward has in use beyond these.
    """

    kept_bytes: int
    loss_bytes: int
    workspace_bytes: int


def stage_memory(
    profile: ModelProfile,
    training: Training,
    configuration: Configuration,
    split: Sequence[int],
    stage: int,
) -> StageMemory:
    """Of one stage.

    Args:
        profile: of the model.
        training: what is given.
        configuration: what is chosen.
        split: layers of each stage.
        stage: 0-based.

    Raises:
        ValueError: the microbatch size was not profiled.
    """
    split = tuple(split)
    first = sum(split[:stage])
    end = first + split[stage]
    layers = [profile.layer(index) for index in range(first, end)]
    size, recompute = configuration.microbatch_size, configuration.recompute
    stash = stash_of(profile, size, recompute, first, end)
    holdings = _Holdings(
        weights=sum(layer.parameter_bytes for layer in layers),
        main_weights=sum(layer.main_bytes for layer in layers),
        gradients=sum(layer.gradient_bytes for layer in layers),
        optimizer=sum(layer.optimizer_bytes for layer in layers),
        buffers=sum(layer.buffer_bytes for layer in layers),
        kept=stash.kept_bytes,
        kept_by_loss=stash.loss_bytes,
        workspace=stash.workspace_bytes,
        received=layers[0].at(size).input_bytes,
        sent=layers[-1].at(size).output_bytes,
    )
    defers = defers_updates(profile, training, configuration, split)
    terms = _terms(holdings, profile, training, configuration, stage, defers=defers)
    return StageMemory(**terms)


class MemoryTable:
    """`stage_memory` of all stages that there can be, for the search of a split that fits.

    Args:
        profile: of the model.
        training: what is given.
        microbatch_size: in samples.
        recompute: what is run again for the backward.
    """

    def __init__(
        self, profile: ModelProfile, training: Training, microbatch_size: int, recompute: Recompute
    ) -> None:
        self._profile, self._training = profile, training
        self._size, self._recompute = microbatch_size, recompute
        entries = [profile.layer(index) for index in range(profile.num_layers)]
        costs = [entry.at(microbatch_size) for entry in entries]
        kept, kept_by_loss, workspace = self._stashes()
        empty = np.zeros_like(kept)
        self._holdings = _Holdings(
            weights=_sums([entry.parameter_bytes for entry in entries]),
            main_weights=_sums([entry.main_bytes for entry in entries]),
            gradients=_sums([entry.gradient_bytes for entry in entries]),
            optimizer=_sums([entry.optimizer_bytes for entry in entries]),
            buffers=_sums([entry.buffer_bytes for entry in entries]),
            kept=kept,
            kept_by_loss=kept_by_loss,
            workspace=workspace,
            received=empty + np.array([*(cost.input_bytes for cost in costs), 0])[:, None],
            sent=empty + np.array([0, *(cost.output_bytes for cost in costs)])[None, :],
        )

    def totals(self, configuration: Configuration, stage: int, *, defers: bool) -> Bytes:
        """Bytes of a stage with this number and the layers ``i <= layer < j``, at ``[i, j]``."""
        terms = _terms(
            self._holdings, self._profile, self._training, configuration, stage, defers=defers
        )
        total: Bytes = sum(terms.values(), np.zeros_like(self._holdings.kept))
        return total

    def stage(
        self, configuration: Configuration, stage: int, first: int, end: int, *, defers: bool
    ) -> StageMemory:
        """Of one of them."""
        one = _Holdings(
            **{
                field.name: int(getattr(self._holdings, field.name)[first, end])
                for field in fields(self._holdings)
            }
        )
        terms = _terms(one, self._profile, self._training, configuration, stage, defers=defers)
        return StageMemory(**terms)

    def _stashes(self) -> tuple[Bytes, Bytes, Bytes]:
        """Stages of equal layers are looked at once."""
        num_layers = self._profile.num_layers
        shape = (num_layers + 1, num_layers + 1)
        tables = tuple(np.zeros(shape, dtype=np.int64) for _ in range(3))
        known: dict[tuple[object, ...], Stash] = {}
        for first in range(num_layers):
            for end in range(first + 1, num_layers + 1):
                key = (self._profile.layers[first:end], end == num_layers)
                if key not in known:
                    known[key] = stash_of(self._profile, self._size, self._recompute, first, end)
                stash = known[key]
                values = (stash.kept_bytes, stash.loss_bytes, stash.workspace_bytes)
                for table, value in zip(tables, values, strict=True):
                    table[first, end] = value
        return tables[0], tables[1], tables[2]


def _sums(values: Sequence[int]) -> Bytes:
    sums = np.concatenate([[0], np.cumsum(np.array(values, dtype=np.int64))])
    between: Bytes = np.maximum(sums[None, :] - sums[:, None], 0)
    return between


@dataclass(frozen=True, slots=True)
class _Holdings(Generic[Number]):
    """What a stage has, before it is known how often: of one stage, or of all that there can be."""

    weights: Number
    main_weights: Number
    gradients: Number
    optimizer: Number
    buffers: Number
    kept: Number
    kept_by_loss: Number
    workspace: Number
    received: Number
    sent: Number


def _terms(
    has: _Holdings[Number],
    profile: ModelProfile,
    training: Training,
    configuration: Configuration,
    stage: int,
    *,
    defers: bool,
) -> dict[str, Number]:
    """The terms of `StageMemory` by name."""
    rule = configuration.rule(stage, defers=defers)
    shares = configuration.dp if training.shard_optimizer else 1
    keeps_plain = _keeps_plain_copy(profile, training, configuration, stage)
    messages = has.received * (MESSAGES_AHEAD + 1) * (stage > 0)
    messages = messages + has.sent * (MESSAGES_AHEAD + 1) * (stage < configuration.pp - 1)
    bucket: Any = np.minimum(has.gradients, BUCKET_BYTES) * (configuration.dp > 1)
    if isinstance(has.gradients, int):
        bucket = int(bucket)
    return {
        "weights": has.weights,
        "older_versions": has.weights * (rule.num_versions - 1),
        "lookahead": has.weights * keeps_plain,
        "main_weights": has.main_weights,
        "gradients": has.gradients,
        "second_gradients": has.gradients * rule.defer_update,
        "optimizer": -(-has.optimizer // shares),
        "buffers": has.buffers,
        "activations": has.kept * rule.max_in_flight,
        "logits": has.kept_by_loss * rule.max_in_flight,
        "workspace": has.workspace,
        "communication": messages + bucket,
    }


def stash_of(
    profile: ModelProfile, microbatch_size: int, recompute: Recompute, first: int, end: int
) -> Stash:
    """What a microbatch needs in the layers ``first <= layer < end``.

    Raises:
        ValueError: the microbatch size was not profiled.
    """
    layers = [profile.layer(index).at(microbatch_size) for index in range(first, end)]
    loss = [profile.loss.at(microbatch_size)] if end == profile.num_layers else []
    match recompute:
        case "layer":
            return _stash_of_inputs(layers, loss)
        case "stage":
            return _stash_of_input(layers, loss)
        case _:
            kept = kept_bytes(layers)
            everything = kept_bytes([*layers, *loss])
            peak = _peak_bytes([*layers, *loss])
            return Stash(kept, everything - kept, max(peak - everything, 0))


def kept_bytes(parts: Sequence[MicrobatchProfile]) -> int:
    """What layers that follow each other keep: each for itself, and what one hands to the next
    once, if either keeps it."""
    given = [0, *(part.kept_output_bytes for part in parts)]
    taken = [*(part.kept_input_bytes for part in parts), 0]
    handed = sum(max(pair) for pair in zip(given, taken, strict=True))
    return handed + sum(part.stash_bytes for part in parts)


def _peak_bytes(parts: Sequence[MicrobatchProfile]) -> int:
    """The most at once in a forward that keeps everything, or in its backward, which lets go of a
    layer's share as soon as the layer is done."""
    before, most = 0, 0  # what the layers before keep, without what they hand on
    handed = 0
    for part in parts:
        held = before + max(handed, part.kept_input_bytes)
        most = max(most, held + max(part.forward_peak_bytes, part.backward_peak_bytes))
        before, handed = held + part.stash_bytes, part.kept_output_bytes
    return most


def _stash_of_inputs(
    layers: Sequence[MicrobatchProfile], loss: Sequence[MicrobatchProfile]
) -> Stash:
    """Each layer is run again from its input."""
    inputs = list(accumulate(layer.input_bytes for layer in layers))
    kept, of_loss = inputs[-1], kept_bytes(loss)
    peaks = [
        held + max(layer.forward_peak_bytes, layer.backward_peak_bytes)
        for held, layer in zip(inputs, layers, strict=True)
    ]
    most = max([*peaks, kept + _peak_bytes(loss)])
    return Stash(kept, of_loss, max(most - kept - of_loss, 0))


def _stash_of_input(
    layers: Sequence[MicrobatchProfile], loss: Sequence[MicrobatchProfile]
) -> Stash:
    """The whole stage is run again from its input."""
    kept, of_loss = layers[0].input_bytes, kept_bytes(loss)
    again = _peak_bytes(layers) - layers[0].kept_input_bytes  # which is this same input
    most = kept + max(again, _peak_bytes(loss))
    return Stash(kept, of_loss, max(most - kept - of_loss, 0))


def _keeps_plain_copy(
    profile: ModelProfile, training: Training, configuration: Configuration, stage: int
) -> bool:
    """Whether there is a copy of the weights as they are, beside the extrapolated ones: in fp32
    the optimizer's; in mixed precision one for microbatches on the newest version."""
    rule = configuration.rule(stage, defers=False)
    if not training.lookahead or rule.num_versions < 2:
        return False
    return profile.precision == "fp32" or configuration.schedule == "2bw-fresh"
