"""GPipe (Huang et al., 2019): all forwards of a batch, then all its backwards, then the update."""

from twobw.core.generators.rule import StageRule


def gpipe(stage: int, num_stages: int, num_microbatches: int) -> StageRule:
    """Flushes after each batch; one version; ``m`` stashed microbatches.

    Two stages, m = 2, one batch::

        stage 0 | F0@0  F1@0   .     .    B0@0       B1@0 U1@1
        stage 1 |  .    F0@0  F1@0  B0@0  B1@0 U1@1
    """
    return StageRule(
        max_in_flight=num_microbatches,
        num_versions=1,
        microbatches_per_update=num_microbatches,
        version=lambda microbatch: microbatch // num_microbatches,
    )
