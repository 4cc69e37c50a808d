"""PipeDream-Flush, or 1F1B (Narayanan et al., 2021, section 3.2)."""

from twobw.core.generators.rule import StageRule


def one_f_one_b(stage: int, num_stages: int, num_microbatches: int) -> StageRule:
    """One forward, one backward, drained after each batch; one version; plain training semantics.

    Two stages, m = 2, one batch::

        stage 0 | F0@0  F1@0   .    B0@0      .      B1@0 U1@1
        stage 1 |  .    F0@0  B0@0  F1@0  B1@0 U1@1
    """
    return StageRule(
        max_in_flight=min(num_stages - stage, num_microbatches),
        num_versions=1,
        microbatches_per_update=num_microbatches,
        version=lambda microbatch: microbatch // num_microbatches,
    )
