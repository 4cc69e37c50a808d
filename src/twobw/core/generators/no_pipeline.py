"""Inter-layer model parallelism: one microbatch in flight, no pipelining."""

from twobw.core.generators.rule import StageRule


def no_pipeline(stage: int, num_stages: int, num_microbatches: int) -> StageRule:
    """Each microbatch goes through all stages and back before the next one starts.

    Two stages, m = 2, one batch::

        stage 0 | F0@0   .     .    B0@0  F1@0   .        .      B1@0 U1@1
        stage 1 |  .    F0@0  B0@0   .     .    F1@0  B1@0 U1@1
    """
    return StageRule(
        max_in_flight=1,
        num_versions=1,
        microbatches_per_update=num_microbatches,
        version=lambda microbatch: microbatch // num_microbatches,
    )
