"""2BW without needless delay: an old version only where the newest is not there yet."""

from dataclasses import replace

from twobw.core.generators.rule import StageRule
from twobw.core.generators.two_bw import two_bw


def two_bw_fresh(
    stage: int,
    num_stages: int,
    num_microbatches: int,
    *,
    extra_in_flight: int = 0,
    update_lag: int = 0,
) -> StageRule:
    """2BW's order of ops, each microbatch on the newest version.

    When stage ``s`` ends batch ``k - 1`` it has begun ``p - 1 - s`` microbatches of batch ``k``.
    Those run on version ``k - 1``, the others on version ``k``, which is then made. The versions
    of a microbatch differ between stages, never between its forward and its backward. A stage
    where every microbatch is fresh has one slot. (With a lag the last stage could do with one,
    too, but for a drain: that makes a version before the last microbatches on the older one.)

    Two stages, m = 2, the start of three batches::

        stage 0 | F0@0  F1@0   .    B0@0  F2@0       B1@0 U1@1  F3@1  B2@0  F4@1       ...
        stage 1 |  .    F0@0  B0@0  F1@0  B1@0 U1@1  F2@1       B2@1  F3@1  B3@1 U3@2  ...

    Args:
        stage: 0-based stage.
        num_stages: pipeline depth.
        num_microbatches: microbatches of a batch.
        extra_in_flight: as for ``2bw``. Each one more in flight is one more on the older version.
        update_lag: microbatches that the update stands after its last backward, so that what must
            be reduced has time to arrive: as many more run on the older version. From
            ``m - (p - 1 - s)`` on, this is ``2bw`` with ``defer_update``.
    """
    begun = (1 + extra_in_flight) * (num_stages - 1 - stage)
    lag = min(update_lag, max(num_microbatches - begun, 0))
    num_old = begun + lag

    def version(microbatch: int) -> int:
        batch, place = divmod(microbatch, num_microbatches)
        return max(batch - 1, 0) if place < num_old else batch

    return replace(
        two_bw(
            stage,
            num_stages,
            num_microbatches,
            extra_in_flight=extra_in_flight,
            defer_update=lag > 0,
        ),
        num_versions=2 if num_old else 1,
        version=version,
    )
