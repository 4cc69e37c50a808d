"""The memory of one stage at its peak, every term by name (ALGORITHM section 4, and what the
paper leaves out). The only place where it is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate

from twobw.planner.configuration import Configuration, Training, defers_updates
from twobw.profiler.profile import MicrobatchProfile, ModelProfile

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
    layers = [profile.layer(index) for index in range(first, first + split[stage])]
    defers = defers_updates(profile, training, configuration, split)
    rule = configuration.rule(stage, defers=defers)
    weights = sum(layer.parameter_bytes for layer in layers)
    gradients = sum(layer.gradient_bytes for layer in layers)
    optimizer = sum(layer.optimizer_bytes for layer in layers)
    shares = configuration.dp if training.shard_optimizer else 1
    stash = stash_of(profile, configuration, first, first + split[stage])
    return StageMemory(
        weights=weights,
        older_versions=(rule.num_versions - 1) * weights,
        lookahead=weights if _keeps_plain_copy(profile, training, configuration, stage) else 0,
        main_weights=sum(layer.main_bytes for layer in layers),
        gradients=gradients,
        second_gradients=gradients if rule.defer_update else 0,
        optimizer=-(-optimizer // shares),
        buffers=sum(layer.buffer_bytes for layer in layers),
        activations=rule.max_in_flight * stash.kept_bytes,
        logits=rule.max_in_flight * stash.loss_bytes,
        workspace=stash.workspace_bytes,
        communication=_communication(profile, configuration, stage, first, split[stage], gradients),
    )


def stash_of(profile: ModelProfile, configuration: Configuration, first: int, end: int) -> Stash:
    """What a microbatch needs in the layers ``first <= layer < end``.

    Raises:
        ValueError: the microbatch size was not profiled.
    """
    size = configuration.microbatch_size
    layers = [profile.layer(index).at(size) for index in range(first, end)]
    loss = [profile.loss.at(size)] if end == profile.num_layers else []
    match configuration.recompute:
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


def _communication(
    profile: ModelProfile,
    configuration: Configuration,
    stage: int,
    first: int,
    count: int,
    gradient_bytes: int,
) -> int:
    """Messages that are expected, and one of each kind that is sent; and a bucket."""
    size = configuration.microbatch_size
    total = 0
    if stage > 0:
        total += (MESSAGES_AHEAD + 1) * profile.layer(first).at(size).input_bytes
    if stage < configuration.pp - 1:
        total += (MESSAGES_AHEAD + 1) * profile.layer(first + count - 1).at(size).output_bytes
    if configuration.dp > 1:
        total += min(gradient_bytes, BUCKET_BYTES)
    return total
