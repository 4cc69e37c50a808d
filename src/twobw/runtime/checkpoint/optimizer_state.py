"""An optimizer and its learning-rate scheduler, by names of parameters: to a record and back.

Which parameters share an optimizer or a group depends on the layout, so state, settings and rates
are looked up for each parameter by its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from twobw.runtime.checkpoint.manifest import (
    CheckpointError,
    GroupRecord,
    OptimizerRecord,
    as_json,
    from_json,
)
from twobw.runtime.checkpoint.reading import Stored

Names: TypeAlias = Mapping[nn.Parameter, str]
"""A parameter -> its name in the unsplit model."""

_NO_SETTINGS = ("params", "param_names")
_ONE_A_GROUP = (  # in the state of torch's schedulers
    "base_lrs",
    "_last_lr",
    "lr_lambdas",
    "min_lrs",
    "max_lrs",
    "base_momentums",
    "max_momentums",
)


def record_optimizer(
    optimizer: Optimizer, scheduler: LRScheduler | None, names: Names
) -> tuple[OptimizerRecord, dict[str, Tensor]]:
    """What there is to keep, and its tensors by their names in a file (see `manifest`).

    Args:
        optimizer: on this rank.
        scheduler: of its learning rate.
        names: of the parameters whose state this rank is to keep.

    Raises:
        CheckpointError: state that is neither a tensor nor fit for JSON.
    """
    kind = type(optimizer).__name__
    groups = [
        GroupRecord(
            [names[parameter] for parameter in group["params"] if parameter in names],
            as_json(
                {k: v for k, v in group.items() if k not in _NO_SETTINGS}, f"a group of {kind}"
            ),
        )
        for group in optimizer.param_groups
    ]
    record = OptimizerRecord(kind, groups, {}, {})
    if scheduler is not None:
        state = as_json(scheduler.state_dict(), type(scheduler).__name__)
        record = OptimizerRecord(kind, groups, {}, {}, state)
    tensors: dict[str, Tensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names or parameter not in optimizer.state:
                continue
            name, state = names[parameter], optimizer.state[parameter]
            own = {key: value for key, value in state.items() if isinstance(value, Tensor)}
            tensors |= {f"optimizer.{key}/{name}": value for key, value in own.items()}
            record.tensors[name] = list(own)
            rest = {key: value for key, value in state.items() if key not in own}
            record.state[name] = as_json(rest, f"the state of {kind}")
    return record, tensors


@dataclass(frozen=True, slots=True)
class _Home:
    """Where a parameter was: its optimizer's record, and the place of its group there."""

    record: OptimizerRecord
    group: int


def restore_optimizer(
    optimizer: Optimizer, scheduler: LRScheduler | None, names: Names, stored: Stored
) -> None:
    """Have an optimizer and its scheduler go on where those of a checkpoint were.

    Raises:
        CheckpointError: the checkpoint's are of another kind, or have other groups.
    """
    homes = {
        name: _Home(record, place)
        for record in stored.manifest.optimizers
        for place, group in enumerate(record.groups)
        for name in group.names
    }
    kind = type(optimizer).__name__
    group_homes = [
        _home_of_group([names[parameter] for parameter in group["params"]], homes, kind, stored)
        for group in optimizer.param_groups
    ]
    state_dict = optimizer.state_dict()
    for saved, home in zip(state_dict["param_groups"], group_homes, strict=True):
        saved.update(from_json(home.record.groups[home.group].settings, saved))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state_dict["state"] = {
        index: state
        for index, parameter in enumerate(parameters)
        if (state := _state_of(parameter, names[parameter], homes, stored)) is not None
    }
    optimizer.load_state_dict(state_dict)
    if scheduler is not None:
        _restore_scheduler(scheduler, group_homes, stored)


def _home_of_group(
    names: Sequence[str], homes: Mapping[str, _Home], kind: str, stored: Stored
) -> _Home:
    """The home of all parameters of a group, as far as settings go."""
    for name in names:
        if name not in homes:
            raise CheckpointError(f"{stored.folder} has no optimizer for {name}")
        if (other := homes[name].record.kind) != kind:
            raise CheckpointError(
                f"{stored.folder} has {other} for {name}, not {kind}; use that, or start anew from "
                "the weights alone"
            )
        first, own = (homes[n].record.groups[homes[n].group].settings for n in (names[0], name))
        if first != own:
            raise CheckpointError(
                f"{names[0]} and {name} are in one parameter group, but had settings of their own "
                f"in {stored.folder}; give them groups of their own"
            )
    return homes[names[0]]


def _state_of(
    parameter: Tensor, name: str, homes: Mapping[str, _Home], stored: Stored
) -> dict[str, Any] | None:
    """A parameter's state; ``None`` where it had none."""
    record = homes[name].record
    if name not in record.state:
        return None
    state: dict[str, Any] = from_json(record.state[name])
    for key in record.tensors[name]:
        value = stored.read(f"optimizer.{key}", name=name)
        if value.shape == parameter.shape:  # in memory as the parameter is
            value = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
        state[key] = value
    return state


def _restore_scheduler(
    scheduler: LRScheduler, group_homes: Sequence[_Home], stored: Stored
) -> None:
    states = [home.record.scheduler for home in group_homes]
    present = [state for state in states if state is not None]
    if len(present) < len(states):
        raise CheckpointError(f"{stored.folder} has no state of a learning-rate scheduler")
    merged = _of_groups(present, [home.group for home in group_homes])
    scheduler.load_state_dict(from_json(merged, scheduler.state_dict()))


def _of_groups(states: Sequence[dict[str, Any]], places: Sequence[int]) -> dict[str, Any]:
    """One scheduler's state, for groups that were at these places under these schedulers."""
    merged: dict[str, Any] = {}
    for key, value in states[0].items():
        if key in _ONE_A_GROUP:
            merged[key] = [state[key][place] for state, place in zip(states, places, strict=True)]
        elif key == "_schedulers":  # of SequentialLR and ChainedScheduler
            rows = zip(*(state[key] for state in states), strict=True)
            merged[key] = [_of_groups(row, places) for row in rows]
        else:
            merged[key] = value
    return merged
