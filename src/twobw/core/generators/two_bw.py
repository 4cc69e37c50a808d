"""PipeDream-2BW: double-buffered weight updates (Narayanan et al., 2021, section 3.1)."""

from twobw.core.generators.rule import StageRule


def two_bw(
    stage: int,
    num_stages: int,
    num_microbatches: int,
    *,
    extra_in_flight: int = 0,
    defer_update: bool = False,
) -> StageRule:
    """1F1B across batch borders, never drained; batch ``k`` runs on version ``max(k - 1, 0)``.

    Two stages, m = 2, the start of three batches::

        stage 0 | F0@0  F1@0   .    B0@0  F2@0       B1@0 U1@1  F3@0  B2@0  F4@1       ...
        stage 1 |  .    F0@0  B0@0  F1@0  B1@0 U1@1  F2@0       B2@0  F3@0  B3@0 U3@2  ...

    Args:
        stage: 0-based stage.
        num_stages: pipeline depth.
        num_microbatches: microbatches of a batch.
        extra_in_flight: raises stage ``s``'s limit by ``extra_in_flight * (p - 1 - s)``; 1 hides
            transfers of up to half a forward-backward slot, for up to twice the stashes.
        defer_update: put the update of batch ``k`` just before the first forward of batch
            ``k + 2``, the first that needs it, instead of after its last backward.
    """
    return StageRule(
        max_in_flight=min(
            num_stages - stage + extra_in_flight * (num_stages - 1 - stage), 2 * num_microbatches
        ),
        num_versions=2,
        microbatches_per_update=num_microbatches,
        version=lambda microbatch: max(microbatch // num_microbatches - 1, 0),
        defer_update=defer_update,
    )
