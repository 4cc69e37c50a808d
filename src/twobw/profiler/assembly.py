"""From what was found out about layers to their `LayerProfile`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median, quantiles

from torch import Tensor

from twobw.profiler.footprint import Footprint
from twobw.profiler.profile import LayerProfile, MicrobatchProfile
from twobw.profiler.solo import SoloLayer


@dataclass(frozen=True, slots=True)
class Duration:
    """Nanoseconds: the median, and the distance between the quartiles."""

    ns: int
    spread_ns: int = 0

    @staticmethod
    def of(samples: Sequence[int]) -> Duration:
        """That of some measured times, at least two."""
        low, _, high = quantiles(samples, n=4, method="inclusive")
        return Duration(round(median(samples)), round(high - low))

    def times(self, factor: float) -> Duration:
        """So much longer."""
        return Duration(round(self.ns * factor), round(self.spread_ns * factor))

    def plus(self, other: Duration) -> Duration:
        """Both, one after the other."""
        return Duration(self.ns + other.ns, self.spread_ns + other.spread_ns)

    def beyond(self, base: Duration) -> Duration:
        """What there is above a base, at least 0."""
        return Duration(max(self.ns - base.ns, 0), self.spread_ns)


def microbatch_profile(
    microbatch_size: int,
    footprint: Footprint,
    forward: Duration,
    backward: Duration,
    recompute: Duration,
) -> MicrobatchProfile:
    """A layer's costs for one microbatch size."""
    return MicrobatchProfile(
        microbatch_size=microbatch_size,
        forward_ns=forward.ns,
        backward_ns=backward.ns,
        recompute_ns=recompute.ns,
        forward_spread_ns=forward.spread_ns,
        backward_spread_ns=backward.spread_ns,
        recompute_spread_ns=recompute.spread_ns,
        **asdict(footprint),
    )


def layer_profile(
    layer: SoloLayer,
    microbatches: Sequence[MicrobatchProfile],
    update: Duration,
    version_copy: Duration,
) -> LayerProfile:
    """A layer's costs.

    Args:
        layer: after an update at least, so that its optimizer has its state.
        microbatches: by ascending size.
        update: of one version.
        version_copy: what an update takes longer where there are two.
    """
    module, weights = layer.module, layer.weights
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    frozen = [parameter for parameter in module.parameters() if not parameter.requires_grad]
    mains = [parameter for _, parameter in weights.optimizer_parameters()]
    state = [
        value
        for optimizer in layer.optimization.optimizers
        for values in optimizer.state.values()
        for value in values.values()
        if isinstance(value, Tensor)
    ]
    return LayerProfile(
        name=type(module).__name__,
        num_parameters=sum(parameter.numel() for parameter in trained),
        parameter_bytes=_num_bytes(trained),
        gradient_bytes=_num_bytes(mains),
        main_bytes=_num_bytes(mains) if weights.is_mixed else 0,
        optimizer_bytes=_num_bytes(state),
        buffer_bytes=_num_bytes([*frozen, *module.buffers()]),
        update_ns=update.ns,
        update_spread_ns=update.spread_ns,
        version_copy_ns=0 if weights.is_mixed else version_copy.ns,  # it casts into either slot
        microbatches=tuple(microbatches),
    )


def _num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
