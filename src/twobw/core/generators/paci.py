"""One version, updated in place, without a flush (after arXiv 2606.07881)."""

from dataclasses import replace

from twobw.core.generators.rule import StageRule
from twobw.core.generators.two_bw_fresh import two_bw_fresh


def paci(
    stage: int, num_stages: int, num_microbatches: int, *, extra_in_flight: int = 0
) -> StageRule:
    """2BW's order of ops on whatever stands in a single slot (arXiv 2606.07881).

    A forward runs on the version that ``2bw-fresh`` gives it, which is the newest at that moment,
    and a backward on the newest, whatever its forward used: those of batch ``k`` on version ``k``.
    After a drain forwards, too, find version ``k``.

    Two stages, m = 2, the start of three batches::

        stage 0 | F0@0  F1@0   .    B0@0  F2@0       B1@0 U1@1  F3@1  B2@1  F4@1       ...
        stage 1 |  .    F0@0  B0@0  F1@0  B1@0 U1@1  F2@1       B2@1  F3@1  B3@1 U3@2  ...

    Args:
        stage: 0-based stage.
        num_stages: pipeline depth.
        num_microbatches: microbatches of a batch.
        extra_in_flight: as for ``2bw-fresh``.
    """
    return replace(
        two_bw_fresh(stage, num_stages, num_microbatches, extra_in_flight=extra_in_flight),
        num_versions=1,
        backward_on_newest=True,
    )
