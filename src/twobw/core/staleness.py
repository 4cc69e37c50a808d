"""How old the weights are that a schedule takes its gradients on."""

from __future__ import annotations

from twobw.core.generators import stage_rule

_BATCHES = 4  # every rule here repeats after fewer


def oldest_gradient(
    name: str, stage: int, num_stages: int, num_microbatches: int, **options: int
) -> int:
    """The most versions between the one that a forward runs on and the one that its update is
    applied to: 0 for fresh gradients, 1 for 2BW's."""
    rule = stage_rule(name, stage, num_stages, num_microbatches, **options)
    return max(
        microbatch // rule.microbatches_per_update - rule.version(microbatch)
        for microbatch in range(_BATCHES * num_microbatches)
    )


def check_lookahead(name: str, num_stages: int, num_microbatches: int, **options: int) -> None:
    """Refuse look-ahead where it has no meaning: extrapolated weights stand for the next version,
    so a gradient may be one batch old, and its backward must find the weights of its forward.

    Raises:
        ValueError: the schedule is not such a one, or as `stage_rule`.
    """
    for stage in range(num_stages):
        sizes = stage, num_stages, num_microbatches
        rule = stage_rule(name, *sizes, **options)
        is_old = oldest_gradient(name, *sizes, **options) > 1
        updates_by_batch = rule.microbatches_per_update == num_microbatches
        if is_old or rule.backward_on_newest or not updates_by_batch:
            raise ValueError(
                f"lookahead does not go with schedule = {name!r}; it is for gradients that are "
                "one batch old, with a slot for that version ('2bw', '2bw-fresh')"
            )


def check_recompute(name: str, num_stages: int, num_microbatches: int) -> None:
    """Refuse running layers again for a backward on other weights than they ran on.

    Raises:
        ValueError: the schedule does not keep the weights of a forward for its backward, or as
            `stage_rule`.
    """
    if stage_rule(name, 0, num_stages, num_microbatches).backward_on_newest:
        raise ValueError(
            f"recompute does not go with schedule = {name!r}, whose backwards run on newer weights "
            "than their forwards: a layer cannot be run again as it was. Use recompute = 'none', "
            "or '2bw-fresh'"
        )
