"""Profiles made by hand."""

from collections.abc import Sequence
from typing import Any

from twobw.planner.cluster import ClusterSpec
from twobw.profiler.profile import LayerProfile, LinkProfile, ModelProfile


def layer(
    name: str = "Block",
    *,
    forward_ns: int = 100,
    backward_ns: int = 200,
    num_parameters: int = 0,
    precision: str = "fp32",
    stash_bytes: int = 0,
    handed_bytes: int = 0,
    workspace_bytes: int = 0,
    optimizer_bytes: int | None = None,
    sizes: Sequence[int] = (1,),
    **more: Any,
) -> LayerProfile:
    """A layer with Adam; costs are in proportion to the microbatch size. It keeps its input."""
    mixed = precision != "fp32"
    return LayerProfile(
        name=name,
        num_parameters=num_parameters,
        parameter_bytes=num_parameters * (2 if mixed else 4),
        gradient_bytes=4 * num_parameters,
        main_bytes=4 * num_parameters if mixed else 0,
        optimizer_bytes=8 * num_parameters if optimizer_bytes is None else optimizer_bytes,
        microbatches=[
            {
                "microbatch_size": size,
                "forward_ns": size * forward_ns,
                "backward_ns": size * backward_ns,
                "recompute_ns": size * forward_ns,
                "input_bytes": size * handed_bytes,
                "output_bytes": size * handed_bytes,
                "stash_bytes": size * stash_bytes,
                "kept_input_bytes": size * handed_bytes,
                "kept_output_bytes": 0,
                "forward_peak_bytes": size * (stash_bytes + handed_bytes),
                "backward_peak_bytes": size * (stash_bytes + workspace_bytes),
            }
            for size in sizes
        ],
        **more,
    )


def profile(
    entries: Sequence[LayerProfile],
    layers: Sequence[int] | None = None,
    *,
    precision: str = "fp32",
    loss: LayerProfile | None = None,
    **more: Any,
) -> ModelProfile:
    """A model of these layers."""
    free = layer("loss", forward_ns=0, backward_ns=0, sizes=entries[0].microbatch_sizes)
    return ModelProfile(
        schema_version=1,
        kind="measured",
        model=more.pop("model", "made up"),
        device="none",
        num_threads=1,
        precision=precision,
        optimizer="adamw",
        entries=tuple(entries),
        layers=tuple(range(len(entries)) if layers is None else layers),
        loss=loss or free,
        overhead=more.pop("overhead", {}),
        **more,
    )


def cluster(devices: int = 4, *, nodes: int = 1, memory: float = 16e9, **links: Any) -> ClusterSpec:
    """Fast links inside nodes, slower ones between."""
    return ClusterSpec(
        name="made up",
        nodes=nodes,
        devices_per_node=devices,
        device_memory_bytes=int(memory),
        inside=links.get("inside", LinkProfile(latency_ns=0, bytes_per_second=10**12)),
        between=links.get("between", LinkProfile(latency_ns=0, bytes_per_second=10**11)),
    )
