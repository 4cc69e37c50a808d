"""PipeDream (Narayanan et al., 2019): an update after every microbatch, versions stashed."""

from twobw.core.generators.rule import StageRule


def weight_stashing(stage: int, num_stages: int, num_microbatches: int) -> StageRule:
    """1F1B without flushes; stage ``s`` runs microbatch ``i`` on version ``max(i - (p-1-s), 0)``
    and keeps up to ``p - s`` versions. Gradients are not averaged over the batch.

    Two stages, the start of two batches of m = 2::

        stage 0 | F0@0  F1@0      .      B0@0 U0@1  F2@1       B1@0 U1@2  F3@2       ...
        stage 1 |  .    F0@0  B0@0 U0@1  F1@1       B1@1 U1@2  F2@2       B2@2 U2@3  ...
    """
    return StageRule(
        max_in_flight=num_stages - stage,
        num_versions=num_stages - stage,
        microbatches_per_update=1,
        version=lambda microbatch: max(microbatch - (num_stages - 1 - stage), 0),
    )
