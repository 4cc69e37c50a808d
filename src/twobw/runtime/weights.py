"""`VersionedWeights`: a stage's weights in a few slots, version ``v`` in slot ``v % num_slots``.

Each slot has Parameters of its own, which `install` puts into the modules: switching copies
nothing. Swapping ``parameter.data`` instead would be silently wrong, because autograd checks
in-place changes per Parameter. The optimizer holds a further set of Parameters that own no
storage: for an update they are pointed at the slot whose version has died, after the newest
weights were copied into it. Then `increment_version` tells autograd that the slot has changed, so
that a backward through a version already overwritten is an error rather than a wrong number.

In mixed precision the slots hold the 16-bit compute copy, and the optimizer's Parameters own fp32
main weights: an update changes those in place and then casts them into the slot that dies.

With look-ahead the slots hold extrapolated weights ``C(v) = W(v) + a (W(v) - W(v-1))``, on which a
gradient is taken that a newer version will get; the optimizer's Parameters own ``W`` itself. In
fp32 the slot that dies keeps ``W(v-1)`` while they are stepped; in mixed precision they are
stepped bucket by bucket, so that no more than a bucket's fp32 weights are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from twobw.runtime.precision import computes_in_fp32
from twobw.runtime.reduction import buckets

_NEWEST, _EXTRAPOLATED = "weights", "extrapolated"  # kinds of tensors in a checkpoint


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
        dtype: what layers compute in; fp32 leaves every parameter's dtype as it is.
        lookahead: ``a``; 0 for none. With one slot it has no effect.
    """

    def __init__(
        self,
        modules: Sequence[tuple[str, nn.Module]],
        num_slots: int,
        dtype: torch.dtype = torch.float32,
        lookahead: float = 0.0,
    ) -> None:
        sites: dict[nn.Parameter, _Site] = {}
        for prefix, module in modules:
            for path, part in module.named_modules():
                for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
                    if parameter.requires_grad:
                        full_name = ".".join(piece for piece in (prefix, path, name) if piece)
                        sites.setdefault(parameter, _Site(full_name)).places.append((part, name))
        self.names = [site.name for site in sites.values()]
        self._places = [site.places for site in sites.values()]
        # .data, unlike .detach(), has a version counter of its own
        self._masters = [nn.Parameter(parameter.data) for parameter in sites]
        self._slots = [list(sites)]
        self.dtype = dtype
        self.is_mixed = dtype != torch.float32
        if self.is_mixed:
            self._slots = [
                [
                    nn.Parameter(_compute_copy(parameter.detach(), site, dtype))
                    for parameter, site in sites.items()
                ]
            ]
            self._hook_into(self._slots[0])
        self._accumulated: list[Tensor | None] = []
        self._lookahead = lookahead
        self._unextrapolated: list[nn.Parameter] | None = None  # W(newest), where slots hold C
        self._installed: list[nn.Parameter] = []
        self._extrapolates = False
        self.newest = 0
        self.rebase(num_slots)

    @property
    def num_slots(self) -> int:
        """Versions that live at once."""
        return len(self._slots)

    def optimizer_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The named Parameters that the optimizer holds; they always show the newest weights."""
        return list(zip(self.names, self._masters, strict=True))

    def master_of(self, parameter: Tensor) -> Tensor:
        """The newest weights of a parameter as it stands in the modules, in full precision; the
        parameter itself where it is not trained."""
        for master, installed in zip(self._masters, self._installed, strict=True):
            if installed is parameter:
                return master
        return parameter

    def installed(self) -> list[nn.Parameter]:
        """The Parameters that the modules use now, in the order of `names`."""
        return self._installed

    def install(self, version: int, *, is_stale: bool = False) -> None:
        """Make the modules use ``version``; nothing is copied.

        Args:
            version: the newest or, of what the slots hold, an older one.
            is_stale: whether the gradient will be applied to a newer version: with look-ahead,
                the extrapolated weights are meant then.

        Raises:
            ValueError: the version is not held.
        """
        if not max(0, self.newest - self.num_slots + 1) <= version <= self.newest:
            raise ValueError(
                f"weight version {version} is not held: {self.num_slots} slots, "
                f"newest version {self.newest}"
            )
        held = self._slots[version % self.num_slots]
        if self._extrapolates and not is_stale and version > 0:  # C(0) is W(0)
            held = self._newest_itself(version)
        if held is not self._installed:
            for places, parameter in zip(self._places, held, strict=True):
                for module, name in places:
                    _put(module, name, parameter)
            self._installed = held

    @contextmanager
    def accumulate(self, gradients: list[Tensor | None]) -> Iterator[None]:
        """While open, backwards through what is installed add into ``gradients`` in place (one a
        parameter, in the order of `names`; ``None`` where there is none yet).

        In mixed precision ``gradients`` are fp32; each parameter's 16-bit gradient is added to
        them as soon as a backward has it, so that no more than one of these exists.
        """
        if self._installed is self._unextrapolated:
            self._trains_unextrapolated = True
        if self.is_mixed:
            self._accumulated = gradients
            yield
            return
        parameters = self._installed
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        yield
        for index, parameter in enumerate(parameters):
            gradients[index], parameter.grad = parameter.grad, None

    def update(
        self, gradients: Sequence[Tensor | None], step: Callable[[Sequence[int]], None]
    ) -> None:
        """Make the next version, in the slot that dies.

        Args:
            gradients: one a parameter.
            step: the optimizers' steps: changes in place the newest weights of the parameters
                with these places, which are those with a gradient now.
        """
        target = self._slots[(self.newest + 1) % self.num_slots]
        everything = range(len(target))
        if self._extrapolates:
            for bucket in buckets(everything, self._masters) if self.is_mixed else [everything]:
                self._step_and_extrapolate(bucket, target, gradients, step)
        elif self.is_mixed:
            self._step(everything, gradients, step)
            for parameter, master in zip(target, self._masters, strict=True):
                parameter.data.copy_(master.data)
        else:
            self._move_masters(target)
            self._step(everything, gradients, step)
        if self.is_mixed and self._unextrapolated is not None:
            self._renew_unextrapolated(self._unextrapolated)
        if not self._may_change_in_flight:
            increment_version([*target, *(self._unextrapolated or ())])
        self.newest += 1

    def _step(
        self,
        places: Sequence[int],
        gradients: Sequence[Tensor | None],
        step: Callable[[Sequence[int]], None],
    ) -> None:
        for place in places:
            self._masters[place].grad = gradients[place]
        step(places)
        for place in places:
            self._masters[place].grad = None

    def _step_and_extrapolate(
        self,
        places: Sequence[int],
        target: Sequence[nn.Parameter],
        gradients: Sequence[Tensor | None],
        step: Callable[[Sequence[int]], None],
    ) -> None:
        masters = [self._masters[place].data for place in places]
        if self.is_mixed:
            before = [master.clone() for master in masters]
        else:
            before = [target[place].data.copy_(self._masters[place].data) for place in places]
        self._step(places, gradients, step)
        for place, old, new in zip(places, before, masters, strict=True):
            old.mul_(-self._lookahead).add_(new, alpha=1 + self._lookahead)
            if self.is_mixed:
                target[place].data.copy_(old)

    def _move_masters(self, target: list[nn.Parameter]) -> None:
        """Copy the newest weights into the slot that dies and point the optimizer at it."""
        for master, parameter in zip(self._masters, target, strict=True):
            if self.num_slots > 1:
                parameter.data.copy_(master.data)
            master.data = parameter.data

    def rebase(self, num_slots: int, *, may_change_in_flight: bool = False) -> None:
        """Forget all versions but the newest, which becomes version 0; nothing may be in flight.

        Args:
            num_slots: how many versions live at once from now on.
            may_change_in_flight: a backward may run on newer weights than its forward: autograd
                is not told of updates.
        """
        self.install(self.newest)
        first = self._installed
        if not self.is_mixed:  # C(0) is W(0), but lies elsewhere
            for master, parameter in zip(self._masters, first, strict=True):
                master.data = parameter.data
        self.newest = 0
        self._may_change_in_flight = may_change_in_flight
        self._extrapolates = self._lookahead != 0 and num_slots > 1
        self._unextrapolated, self._trains_unextrapolated = None, False
        if self._extrapolates and not self.is_mixed:  # the optimizer's Parameters own its storage
            self._unextrapolated, first = first, self._like(first)
            for parameter, master in zip(first, self._masters, strict=True):
                parameter.data.copy_(master.data)
        self._slots = [first, *(self._like(first) for _ in range(num_slots - 1))]

    def live_versions(self) -> dict[str, list[Tensor]]:
        """All that the versions yet to come follow from, by kind (see `checkpoint.manifest`), a
        tensor a parameter. What can be cast or copied from another is left out."""
        slots = {
            kind: [parameter.data for parameter in self._slot_of(back)]
            for back, kind in enumerate(self._slot_kinds())
        }
        if not self._extrapolates:
            del slots[_NEWEST]
        return {_NEWEST: [master.data for master in self._masters], **slots}

    def restore(self, newest: int, find: Callable[[Sequence[str], str], Tensor]) -> None:
        """Take over versions, the newest of which is ``newest``; nothing may be in flight.

        Args:
            newest: its number.
            find: from kinds (see `checkpoint.manifest`) and a name to the tensor of the first kind
                that there is. Where an older version or an extrapolated copy is not known, the
                next newer one stands in.
        """
        self.newest = newest
        if not (self.is_mixed or self._extrapolates):
            for master, parameter in zip(self._masters, self._slot_of(0), strict=True):
                master.data = parameter.data
        for name, master in zip(self.names, self._masters, strict=True):
            master.data.copy_(find([_NEWEST], name))
        kinds = self._slot_kinds()
        for back in range(len(kinds)):
            known = [*reversed(kinds[: back + 1])]
            if self._extrapolates and back:
                known.insert(1, f"{_NEWEST}-{back}")
            for name, parameter in zip(self.names, self._slot_of(back), strict=True):
                parameter.data.copy_(find([*known, _NEWEST], name))
        if self.is_mixed:
            self._unextrapolated = None
        self.install(newest)

    def _slot_of(self, back: int) -> list[nn.Parameter]:
        """The slot of the version that is so many before the newest."""
        return self._slots[(self.newest - back) % self.num_slots]

    def _slot_kinds(self) -> list[str]:
        """What the slots hold, from the newest version back."""
        kind = _EXTRAPOLATED if self._extrapolates else _NEWEST
        live = min(self.num_slots, self.newest + 1)
        return [kind, *(f"{kind}-{back}" for back in range(1, live))]

    def _newest_itself(self, version: int) -> list[nn.Parameter]:
        """Parameters for ``W(version)``, where the slots hold extrapolated weights. A 16-bit copy
        is made when it is asked for."""
        if version != self.newest:
            raise ValueError(
                f"weight version {version} is held extrapolated only; the newest is {self.newest}"
            )
        if self._unextrapolated is None:
            self._unextrapolated = self._like(self._slots[0])
            for parameter, master in zip(self._unextrapolated, self._masters, strict=True):
                parameter.data.copy_(master.data)
        return self._unextrapolated

    def _renew_unextrapolated(self, copy: Sequence[nn.Parameter]) -> None:
        """After an update: a copy that is trained through is made anew in its place; one that was
        made for an evaluation goes."""
        if not self._trains_unextrapolated:
            self._unextrapolated = None
            return
        for parameter, master in zip(copy, self._masters, strict=True):
            parameter.data.copy_(master.data)

    def _add_in_fp32(self, index: int, parameter: Tensor) -> None:
        """Called when a backward has the whole gradient of a parameter."""
        gradient, total = parameter.grad, self._accumulated[index]
        assert gradient is not None, "it was just accumulated"
        in_full = gradient.to(self._masters[index].dtype)
        self._accumulated[index] = in_full if total is None else total.add_(gradient)
        parameter.grad = None

    def _like(self, slot: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Another slot, not filled."""
        other = [nn.Parameter(torch.empty_like(parameter)) for parameter in slot]
        if self.is_mixed:
            self._hook_into(other)
        return other

    def _hook_into(self, slot: Sequence[nn.Parameter]) -> None:
        for index, parameter in enumerate(slot):
            parameter.register_post_accumulate_grad_hook(partial(self._add_in_fp32, index))


def _compute_copy(parameter: Tensor, site: _Site, dtype: torch.dtype) -> Tensor:
    """A copy in ``dtype``; in its own where that is not fp32, or the module needs fp32."""
    keeps = parameter.dtype != torch.float32 or any(computes_in_fp32(m) for m, _ in site.places)
    return parameter.clone() if keeps else parameter.to(dtype)


def _put(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """``module.name = parameter``, by the short way where the class has no setter of its own
    (recurrent layers have one: they keep a flat list of their weights)."""
    if type(module).__setattr__ is nn.Module.__setattr__:
        module._parameters[name] = parameter
    else:
        setattr(module, name, parameter)
