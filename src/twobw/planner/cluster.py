"""`ClusterSpec`: the devices that there are, their memory, and the links between them."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from twobw.profiler.profile import LinkProfile

Size = Annotated[int, Field(ge=1)]


class ClusterError(ValueError):
    """A description of a cluster that will not do, with every problem found."""


class ClusterSpec(BaseModel):
    """Equal nodes of equal devices.

    Attributes:
        name: for what is printed.
        nodes: machines.
        devices_per_node: of each.
        device_memory_bytes: that training may use of a device.
        inside: link from one device to another of its node.
        between: link of a node to the others, which its devices share; needed for more than one.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: Annotated[str, Field(min_length=1)]
    nodes: Size = 1
    devices_per_node: Size
    device_memory_bytes: Size
    inside: LinkProfile
    between: LinkProfile | None = None

    @model_validator(mode="after")
    def _nodes_are_joined(self) -> ClusterSpec:
        if self.nodes > 1 and self.between is None:
            raise ValueError(f"{self.nodes} nodes need [between], the link that joins them")
        return self

    @property
    def num_devices(self) -> int:
        """In all nodes."""
        return self.nodes * self.devices_per_node

    def link(self, *, crosses: bool) -> LinkProfile:
        """The link between nodes, or within one."""
        return self.between if crosses and self.between is not None else self.inside

    def to_toml(self) -> str:
        """The inverse of `load_cluster`."""
        lines = [
            f"name = {json.dumps(self.name)}",
            f"nodes = {self.nodes}",
            f"devices_per_node = {self.devices_per_node}",
            f"device_memory_bytes = {self.device_memory_bytes:_}",
        ]
        for name, link in (("inside", self.inside), ("between", self.between)):
            if link is not None:
                lines += ["", f"[{name}]", f"bytes_per_second = {link.bytes_per_second:_}"]
                lines += [f"latency_ns = {link.latency_ns:_}"]
        return "\n".join(lines) + "\n"


def load_cluster(path: Path) -> ClusterSpec:
    """Read a description from a TOML file.

    Such as::

        name = "2 servers of 8 V100"
        nodes = 2
        devices_per_node = 8
        device_memory_bytes = 16_000_000_000

        [inside]
        bytes_per_second = 100_000_000_000
        latency_ns = 10_000

        [between]
        bytes_per_second = 3_125_000_000
        latency_ns = 50_000

    Raises:
        ClusterError: it cannot be read, or is not a whole description.
    """
    try:
        return ClusterSpec.model_validate(tomllib.loads(path.read_text("utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ClusterError(f"{path} cannot be read as TOML: {error}") from error
    except ValidationError as error:
        lines = [
            f"{'.'.join(map(str, detail['loc'])) or 'cluster'}: {detail['msg']}"
            for detail in error.errors(include_url=False)
        ]
        raise ClusterError("\n  ".join([f"{path} describes no cluster:", *lines])) from error
