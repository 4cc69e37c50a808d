"""`VersionedWeights`: a stage's weights in a few slots, version ``v`` in slot ``v % num_slots``.

Each slot has Parameters of its own, which `install` puts into the modules: switching copies
nothing. Swapping ``parameter.data`` instead would be silently wrong, because autograd checks
in-place changes per Parameter. The optimizer holds a further set of Parameters that own no
storage: for an update they are pointed at the slot whose version has died, after the newest
weights were copied into it. Then `increment_version` tells autograd that the slot has changed, so
that a backward through a version already overwritten is an error rather than a wrong number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version


@dataclass(slots=True)
class _Site:
    """Where a parameter stands in the modules: it may stand in several places."""

    name: str
    places: list[tuple[nn.Module, str]] = field(default_factory=list)


class VersionedWeights:
    """The trainable parameters of some modules, in ``num_slots`` versions.

    Frozen parameters and buffers are left where they are: all versions share them.

    Args:
        modules: ``(prefix, module)`` pairs; a parameter's name is ``prefix.name``.
        num_slots: how many versions live at once.
    """

    def __init__(self, modules: Sequence[tuple[str, nn.Module]], num_slots: int) -> None:
        sites: dict[nn.Parameter, _Site] = {}
        for prefix, module in modules:
            for path, part in module.named_modules():
                for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
                    if parameter.requires_grad:
                        full_name = ".".join(piece for piece in (prefix, path, name) if piece)
                        sites.setdefault(parameter, _Site(full_name)).places.append((part, name))
        self.names = [site.name for site in sites.values()]
        self._places = [site.places for site in sites.values()]
        self._slots = [list(sites)]
        # .data, unlike .detach(), has a version counter of its own
        self._masters = [nn.Parameter(parameter.data) for parameter in sites]
        self.newest = 0
        self._installed = 0
        self._resize(num_slots)

    @property
    def num_slots(self) -> int:
        """Versions that live at once."""
        return len(self._slots)

    def optimizer_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The named Parameters that the optimizer holds; they always show the newest weights."""
        return list(zip(self.names, self._masters, strict=True))

    def install(self, version: int) -> None:
        """Make the modules use ``version``; nothing is copied.

        Raises:
            ValueError: the version is not held.
        """
        if not max(0, self.newest - self.num_slots + 1) <= version <= self.newest:
            raise ValueError(
                f"weight version {version} is not held: {self.num_slots} slots, "
                f"newest version {self.newest}"
            )
        slot = version % self.num_slots
        if slot == self._installed:
            return
        for places, parameter in zip(self._places, self._slots[slot], strict=True):
            for module, name in places:
                _put(module, name, parameter)
        self._installed = slot

    @contextmanager
    def accumulate(self, version: int, gradients: list[Tensor | None]) -> Iterator[None]:
        """Install ``version``; while open, backwards add into ``gradients`` in place (one a
        parameter, in the order of `names`; ``None`` where there is none yet)."""
        self.install(version)
        parameters = self._slots[self._installed]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        yield
        for index, parameter in enumerate(parameters):
            gradients[index] = parameter.grad
            parameter.grad = None

    def update(self, gradients: Sequence[Tensor | None], step: Callable[[], None]) -> None:
        """Make the next version: copy the newest into the slot that dies, let ``step`` (the
        optimizers' steps) change it in place."""
        target = self._slots[(self.newest + 1) % self.num_slots]
        source = self._slots[self.newest % self.num_slots]
        with torch.no_grad():
            for new, old in zip(target, source, strict=True):
                if new is not old:
                    new.data.copy_(old)
        for master, parameter, gradient in zip(self._masters, target, gradients, strict=True):
            master.data = parameter.data
            master.grad = gradient
        step()
        for master in self._masters:
            master.grad = None
        increment_version(target)
        self.newest += 1

    def rebase(self, num_slots: int) -> None:
        """Forget all versions but the newest, which becomes version 0 of ``num_slots``; nothing
        may be in flight."""
        self.install(self.newest)
        self._slots = [self._slots[self._installed]]
        self._installed = self.newest = 0
        self._resize(num_slots)

    def _resize(self, num_slots: int) -> None:
        first = self._slots[0]
        self._slots += [
            [nn.Parameter(torch.empty_like(parameter)) for parameter in first]
            for _ in range(num_slots - 1)
        ]


def _put(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """``module.name = parameter``, by the short way where the class has no setter of its own
    (recurrent layers have one: they keep a flat list of their weights)."""
    if type(module).__setattr__ is nn.Module.__setattr__:
        module._parameters[name] = parameter
    else:
        setattr(module, name, parameter)
