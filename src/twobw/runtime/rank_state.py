"""What a rank gives to a checkpoint and takes from one, under the unsplit model's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from twobw.runtime.checkpoint.manifest import CheckpointError, OptimizerRecord
from twobw.runtime.checkpoint.optimizer_state import record_optimizer, restore_optimizer
from twobw.runtime.checkpoint.reading import Stored
from twobw.runtime.checkpoint.writing import Part
from twobw.runtime.layers import TiedNames, owners_names
from twobw.runtime.mesh import Mesh
from twobw.runtime.optimization import Optimization
from twobw.runtime.stage import Stage
from twobw.runtime.weights import VersionedWeights


@dataclass(frozen=True, slots=True)
class RankState:
    """The parts of a rank that a checkpoint is about. Nothing may be in flight.

    Of what several ranks have, one writes it: of replicas the first, of stages with a copy of a
    tied weight the owner. Replicas differ in buffers, and in optimizer state where that is spread
    over them.
    """

    mesh: Mesh
    stage: Stage
    weights: VersionedWeights
    optimization: Optimization
    ties: Sequence[TiedNames]

    def part(self) -> Part:
        """Copies on the CPU of what this rank writes.

        Raises:
            CheckpointError: an optimizer has state that a checkpoint cannot hold.
        """
        tensors: dict[str, Tensor] = {}
        if self.mesh.replica == 0:
            for kind, values in self.weights.live_versions().items():
                for name, value in zip(self.weights.names, values, strict=True):
                    if self._is_owner(name):
                        tensors[f"{kind}/{name}"] = value
        kind = _rest_of(self.mesh.replica)
        tensors |= {f"{kind}/{name}": value for name, value in self._rest().items()}
        optimizers: list[OptimizerRecord] = []
        if self.mesh.replica == 0 or self.optimization.is_sharded:
            names = {
                parameter: name
                for name, parameter in self.weights.optimizer_parameters()
                if self._is_owner(name)
            }
            for optimizer, scheduler in self.optimization.pairs():
                record, state = record_optimizer(optimizer, scheduler, names)
                optimizers.append(record)
                tensors |= state
        copies = {key: _copy(tensor) for key, tensor in tensors.items()}
        return Part(self.mesh.rank, copies, optimizers)

    def restore(self, stored: Stored, newest: int, *, same_versions: bool) -> None:
        """Take over what this rank needs of a checkpoint, of whatever layout.

        Args:
            stored: the checkpoint.
            newest: number of the newest weight version.
            same_versions: whether the checkpoint's versions are made as often as this schedule's;
                if not, only the newest counts.

        Raises:
            CheckpointError: names, shapes or optimizers differ from the checkpoint's.
        """
        self._check_names(stored)

        def find(kinds: Sequence[str], name: str) -> Tensor:
            used = kinds if same_versions else kinds[-1:]
            return stored.read(*used, name=self._stored_name(name))

        rest, kind = self._rest(), _rest_of(self.mesh.replica)
        names = {p: self._stored_name(name) for name, p in self.weights.optimizer_parameters()}
        for parameter, name in names.items():
            _check_shape(stored, name, stored.read("weights", name=name), parameter)
        self.weights.restore(newest, find)
        for name, tensor in rest.items():
            value = stored.read(kind, _rest_of(0), name=name)
            _check_shape(stored, name, value, tensor)
            tensor.data.copy_(value)
        for optimizer, scheduler in self.optimization.pairs():
            restore_optimizer(optimizer, scheduler, names, stored)

    def _rest(self) -> dict[str, Tensor]:
        """Buffers and frozen parameters."""
        trained = set(self.weights.installed())
        return {name: t for name, t in self.stage.tensors().items() if t not in trained}

    def _is_owner(self, name: str) -> bool:
        return self._stored_name(name) == name

    def _stored_name(self, name: str) -> str:
        """A tied weight is stored once, under its first name in the unsplit model."""
        return owners_names(self.ties, self.mesh.stage).get(name, name)

    def _check_names(self, stored: Stored) -> None:
        """Refuse a checkpoint of a model whose layers have other tensors than this stage's."""
        first = self.stage.first_layer
        numbers = {str(number) for number in range(first, first + len(self.stage.layers))}
        for kind, own in (("weights", self.weights.names), (_rest_of(0), self._rest())):
            wanted = {self._stored_name(name) for name in own}
            found = {n for n in stored.names(kind) if n.partition(".")[0] in numbers}
            if missing := sorted(wanted - set(stored.names(kind))):
                raise CheckpointError(f"{stored.folder} has no {kind} of {missing[0]}")
            if more := sorted(found - wanted):
                raise CheckpointError(
                    f"{stored.folder} has {kind} of {more[0]}, which the model has not"
                )


def _rest_of(replica: int) -> str:
    return f"rest@{replica}" if replica else "rest"


def _copy(tensor: Tensor) -> Tensor:
    copy = tensor.detach().to("cpu", copy=True)
    return copy.contiguous()


def _check_shape(stored: Stored, name: str, found: Tensor, wanted: Tensor) -> None:
    if found.shape != wanted.shape:
        raise CheckpointError(
            f"{name} has the shape {list(wanted.shape)} in the model and {list(found.shape)} in "
            f"{stored.folder}"
        )
