"""`ModelProfile`: what each layer of a model costs, as data. No torch.

Times are integer nanoseconds, sizes integer bytes. A time is a median; its spread is the distance
between the quartiles, 0 where nothing was measured. Layers that are equal share one entry.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

SCHEMA_VERSION: Literal[1] = 1

Count = Annotated[int, Field(ge=0)]
Size = Annotated[int, Field(ge=1)]
Text = Annotated[str, Field(min_length=1)]


class ProfileError(ValueError):
    """A profile that cannot be read, with every problem found."""


class _Record(BaseModel):
    """Frozen; unknown keys and wrong types are refused. A JSON list is a tuple."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class MicrobatchProfile(_Record):
    """What one layer costs for microbatches of one size.

    The bytes that autograd keeps for the backward are in three parts, because a layer's output is
    the next one's input and is kept once: see `ModelProfile.stash_bytes`.

    Attributes:
        microbatch_size: in samples.
        forward_ns: a forward, with gradients recorded.
        backward_ns: a backward, the gradients of parameters added to those of earlier
            microbatches; nothing run again.
        recompute_ns: what forward and backward take longer if the layer is run again from its
            input, of which it keeps a copy.
        forward_spread_ns: of ``forward_ns``.
        backward_spread_ns: of ``backward_ns``.
        recompute_spread_ns: of ``recompute_ns``.
        input_bytes: of what the layer is given.
        output_bytes: of what it gives; the message to the next stage, and the gradient back.
        stash_bytes: kept for the backward besides its input and output; parameters and buffers
            do not count, tensors that share a storage count once.
        kept_input_bytes: of the input, what is kept for the backward.
        kept_output_bytes: of the output, what is kept for the backward.
        forward_peak_bytes: the most at once, during the forward, in tensors that it makes: its
            stash and its output among them.
        backward_peak_bytes: the most at once, during the backward, in the layer's stash, the
            gradient that it is given and all tensors that it makes, new gradients of parameters
            among them; the sums that these are added to are not.
    """

    microbatch_size: Size
    forward_ns: Count
    backward_ns: Count
    recompute_ns: Count
    forward_spread_ns: Count = 0
    backward_spread_ns: Count = 0
    recompute_spread_ns: Count = 0
    input_bytes: Count
    output_bytes: Count
    stash_bytes: Count
    kept_input_bytes: Count
    kept_output_bytes: Count
    forward_peak_bytes: Count
    backward_peak_bytes: Count


class LayerProfile(_Record):
    """What a layer costs.

    Attributes:
        name: the class of its module, or ``"loss"``.
        num_parameters: those that are trained. Tied ones count in each layer that has them.
        parameter_bytes: one version of those, in the dtype that is computed in.
        gradient_bytes: one gradient of those, in the dtype that it is summed in.
        main_bytes: the optimizer's own copy of them: fp32 in mixed precision, else 0.
        optimizer_bytes: what the optimizer keeps for them besides.
        buffer_bytes: buffers and parameters that are not trained, which all versions share.
        update_ns: an optimizer's step on them in place, or in mixed precision on the main copy,
            cast included.
        update_spread_ns: of ``update_ns``.
        version_copy_ns: what an update takes longer where more than one version is kept: the
            newest weights are copied first. 0 in mixed precision.
        microbatches: by ascending microbatch size, at least one.
    """

    name: Text
    num_parameters: Count = 0
    parameter_bytes: Count = 0
    gradient_bytes: Count = 0
    main_bytes: Count = 0
    optimizer_bytes: Count = 0
    buffer_bytes: Count = 0
    update_ns: Count = 0
    update_spread_ns: Count = 0
    version_copy_ns: Count = 0
    microbatches: Annotated[tuple[MicrobatchProfile, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _ascends(self) -> LayerProfile:
        sizes = [entry.microbatch_size for entry in self.microbatches]
        if sizes != sorted(set(sizes)):
            raise ValueError(f"microbatch sizes {sizes} do not ascend")
        return self

    @property
    def microbatch_sizes(self) -> tuple[int, ...]:
        """The sizes profiled, ascending."""
        return tuple(entry.microbatch_size for entry in self.microbatches)

    def at(self, microbatch_size: int) -> MicrobatchProfile:
        """The costs for one microbatch size.

        Raises:
            ValueError: the size was not profiled.
        """
        for entry in self.microbatches:
            if entry.microbatch_size == microbatch_size:
                return entry
        known = ", ".join(str(size) for size in self.microbatch_sizes)
        raise ValueError(f"no profile for microbatches of {microbatch_size}; there is {known}")


class TieProfile(_Record):
    """A parameter that several layers share.

    Attributes:
        layers: their places in the model, ascending.
        num_parameters: of the shared parameter.
    """

    layers: Annotated[tuple[Count, ...], Field(min_length=2)]
    num_parameters: Size


class OverheadProfile(_Record):
    """What the executor itself takes on a rank, whatever the layers; beside their times.

    Attributes:
        op_ns: of a forward or a backward.
        message_ns: of handing a message to the transport, or of taking one that has arrived.
        batch_ns: of a batch: its beginning, its loss, its update's bookkeeping.
    """

    op_ns: Count = 0
    message_ns: Count = 0
    batch_ns: Count = 0


class LinkProfile(_Record):
    """A link between two ranks, through the runtime's transport.

    Attributes:
        latency_ns: until an empty message has arrived.
        bytes_per_second: of long messages.
    """

    latency_ns: Count
    bytes_per_second: Size


class ModelProfile(_Record):
    """What a model costs on one device.

    Attributes:
        schema_version: of this file.
        kind: measured on a machine, or computed from a device's description.
        model: name of the model's size.
        device: where it was measured, or the description's name.
        num_threads: threads a rank; 0 for a GPU.
        num_ranks: ranks that were busy on the machine at once: ranks of one machine share its
            memory bandwidth and caches.
        slowdown: how much longer all took by the clock than in processor time, because of other
            programs; all times of entries, loss and overhead have been multiplied by it.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        optimizer: name of the optimizer.
        recomputes_attention: whether attention is run again within ``backward_ns`` and is kept
            out of the stash.
        entries: what distinct layers cost.
        layers: for each layer of the model, in order, its place in ``entries``.
        loss: what the loss costs on the last stage, its gradient included.
        ties: parameters that several layers share.
        overhead: of the executor.
        link: between two ranks; ``None`` if it was not measured.
    """

    schema_version: Literal[1]
    kind: Literal["measured", "analytic"]
    model: Text
    device: Text
    num_threads: Count
    num_ranks: Size = 1
    slowdown: Annotated[float, Field(gt=0.0)] = 1.0
    precision: Literal["fp32", "bf16", "fp16"]
    optimizer: Text
    recomputes_attention: bool = False
    entries: Annotated[tuple[LayerProfile, ...], Field(min_length=1)]
    layers: Annotated[tuple[Count, ...], Field(min_length=1)]
    loss: LayerProfile
    ties: tuple[TieProfile, ...] = ()
    overhead: OverheadProfile
    link: LinkProfile | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> ModelProfile:
        if sorted(set(self.layers)) != list(range(len(self.entries))):
            raise ValueError(
                f"layers name the entries {sorted(set(self.layers))}, of which there are "
                f"{len(self.entries)}"
            )
        for entry in self.entries:
            if entry.microbatch_sizes != self.loss.microbatch_sizes:
                raise ValueError(
                    f"{entry.name} has microbatches of {entry.microbatch_sizes}, "
                    f"the loss of {self.loss.microbatch_sizes}"
                )
        for tie in self.ties:
            if list(tie.layers) != sorted(set(tie.layers)) or tie.layers[-1] >= len(self.layers):
                raise ValueError(f"a tie of the layers {tie.layers} out of {len(self.layers)}")
        return self

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.layers)

    @property
    def microbatch_sizes(self) -> tuple[int, ...]:
        """The sizes profiled, ascending."""
        return self.loss.microbatch_sizes

    def layer(self, index: int) -> LayerProfile:
        """What the layer at a place (0-based) of the model costs; equal layers give one object."""
        return self.entries[self.layers[index]]

    def stash_bytes(self, first: int, end: int, microbatch_size: int) -> int:
        """What autograd keeps of one microbatch in the layers ``first <= layer < end``, with the
        loss where ``end`` is the last layer's: what each keeps for itself, and what is handed from
        one to the next once, if either keeps it. The input of the first is among it."""
        parts = [self.layer(index).at(microbatch_size) for index in range(first, end)]
        if end == self.num_layers:
            parts.append(self.loss.at(microbatch_size))
        given = [0, *(part.kept_output_bytes for part in parts)]
        taken = [*(part.kept_input_bytes for part in parts), 0]
        handed = sum(max(pair) for pair in zip(given, taken, strict=True))
        return handed + sum(part.stash_bytes for part in parts)

    def to_json(self) -> str:
        """As readable JSON."""
        return self.model_dump_json(indent=1) + "\n"

    @staticmethod
    def from_json(text: str | bytes, source: str = "profile") -> ModelProfile:
        """The inverse of `to_json`.

        Args:
            text: the JSON.
            source: where it is from, for messages.

        Raises:
            ProfileError: it is not a whole profile of this schema version.
        """
        try:
            return ModelProfile.model_validate_json(text, strict=True)
        except ValidationError as error:
            details = error.errors(include_url=False)
            lines = [
                f"{'.'.join(str(part) for part in d['loc']) or 'profile'}: {d['msg']}"
                for d in details
            ]
            if any(d["loc"] == ("schema_version",) for d in details):
                lines = [
                    f"its schema_version is not {SCHEMA_VERSION}, which this twobw reads; "
                    "profile again"
                ]
            raise ProfileError("\n  ".join([f"{source} is no profile:", *lines])) from error


def load_profile(path: Path) -> ModelProfile:
    """Read a profile from a file.

    Raises:
        OSError: it cannot be read.
        ProfileError: it is not a whole profile of this schema version.
    """
    return ModelProfile.from_json(path.read_bytes(), str(path))
