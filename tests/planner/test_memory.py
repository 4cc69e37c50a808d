from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planner.support import layer, profile
from twobw.planner.configuration import Configuration, Training
from twobw.planner.memory import MemoryTable, StageMemory, kept_bytes, stage_memory
from twobw.profiler.profile import MicrobatchProfile, ModelProfile

TRAINING = Training(global_batch_size=8)
PARAMETERS = 1000


def memory(
    model: ModelProfile,
    schedule: str,
    stage: int,
    *,
    pp: int = 2,
    m: int = 8,
    dp: int = 1,
    training: Training = TRAINING,
    **more: Any,
) -> StageMemory:
    configuration = Configuration(pp, dp, 1, m, schedule, **more)
    split = [model.num_layers // pp] * pp
    return stage_memory(model, training, configuration, split, stage)


CLIPPED = replace(TRAINING, clips=True)
AHEAD = replace(TRAINING, lookahead=True)


@pytest.mark.parametrize(
    ("stated", "precision", "schedule", "training", "dp"),
    [
        (16, "fp32", "1f1b", TRAINING, 1),
        (20, "fp32", "2bw", TRAINING, 1),
        (18, "bf16", "1f1b", TRAINING, 1),
        (20, "bf16", "2bw", TRAINING, 1),
        (20, "fp32", "2bw", replace(CLIPPED, overlap_reduce=False), 1),
        (24, "fp32", "2bw", CLIPPED, 1),
        (24, "bf16", "2bw", CLIPPED, 1),
        (16, "fp32", "paci", TRAINING, 1),
        (20, "fp32", "2bw-fresh", TRAINING, 1),
        (24, "fp32", "2bw", AHEAD, 1),
        (24, "fp32", "2bw-fresh", AHEAD, 1),
        (20, "bf16", "2bw", AHEAD, 1),
        (22, "bf16", "2bw-fresh", AHEAD, 1),
        (24, "fp32", "2bw", TRAINING, 2),
        (20, "fp32", "2bw", replace(TRAINING, shard_optimizer=True), 2),
    ],
)
def test_bytes_a_parameter(
    stated: int, precision: str, schedule: str, training: Training, dp: int
) -> None:
    model = profile(
        [layer(num_parameters=PARAMETERS, precision=precision)], [0, 0], precision=precision
    )
    used = memory(model, schedule, 0, dp=dp, training=training)
    assert used.total - used.communication == stated * PARAMETERS


# A layer of 64 x 4096 and back, in fp32: it keeps its input and two rows inside.
def narrow_wide_narrow(rows: int) -> ModelProfile:
    entry = layer(
        num_parameters=2 * 64 * 4096 + 64 + 4096,
        stash_bytes=2 * 4096 * 4 * rows,
        handed_bytes=64 * 4 * rows,
        workspace_bytes=4096 * 4 * rows,
        optimizer_bytes=0,
    )
    return profile([entry], [0] * 16)


@pytest.mark.parametrize(("stage", "megabytes"), [(0, 803), (1, 938)])
def test_gpipe_less_2bw(stage: int, megabytes: int) -> None:
    model = narrow_wide_narrow(rows=1024)
    model = model.model_copy(update={"layers": model.layers[:8]})
    less = memory(model, "gpipe", stage).total - memory(model, "2bw", stage).total
    assert less / 1e6 == pytest.approx(megabytes, rel=0.01)


@pytest.mark.parametrize(("stage", "megabytes"), [(0, 252), (1, 185), (2, 117), (3, 50)])
def test_recompute_by_layer_saves(stage: int, megabytes: int) -> None:
    model = narrow_wide_narrow(rows=512)
    sizes: dict[str, Any] = {"pp": 4, "m": 4}
    plain = memory(model, "2bw", stage, **sizes)
    again = memory(model, "2bw", stage, recompute="layer", **sizes)
    assert (plain.total - again.total) / 1e6 == pytest.approx(megabytes, rel=0.02)


A, W, INPUT = 4 * 800, 4 * 4 * PARAMETERS, 10


@pytest.mark.parametrize(
    ("schedule", "versions", "stashes"), [("gpipe", 1, 8), ("1f1b", 1, 4), ("2bw", 2, 4)]
)
def test_the_papers_terms(schedule: str, versions: int, stashes: int) -> None:
    model = profile(
        [layer(num_parameters=PARAMETERS, stash_bytes=800, handed_bytes=INPUT)], [0] * 4
    )
    plain = memory(model, schedule, 0, pp=4)
    assert plain.weights + plain.older_versions == versions * W / 4
    assert plain.activations == stashes * (A / 4 + INPUT)
    again = memory(model, schedule, 0, pp=4, recompute="stage")
    assert again.activations + again.workspace == stashes * INPUT + A / 4 + INPUT


def test_weight_stashing_keeps_a_version_for_each_microbatch_in_flight() -> None:
    model = profile([layer(num_parameters=PARAMETERS)], [0] * 4)
    versions = [memory(model, "weight-stashing", s, pp=4).older_versions // 4000 for s in range(4)]
    assert versions == [3, 2, 1, 0]


def test_every_term_by_name() -> None:
    loss = layer("loss", stash_bytes=70, handed_bytes=30)
    entry = layer(
        num_parameters=10, stash_bytes=500, handed_bytes=30, workspace_bytes=90, buffer_bytes=8
    )
    model = profile([entry], [0, 0], loss=loss)
    used = memory(model, "2bw", 1, dp=2)
    assert used == StageMemory(
        weights=40,
        older_versions=40,
        gradients=40,
        second_gradients=40,
        optimizer=80,
        buffers=8,
        activations=530,
        logits=100,
        workspace=30,  # the loss's output; it has let go of 100 when the layer needs 90 more
        communication=3 * 30 + 40,
    )
    assert sum(used.by_kind().values()) == used.total


def test_more_in_flight_is_more_stashes() -> None:
    model = profile([layer(stash_bytes=100)], [0] * 4)
    assert memory(model, "2bw", 0, pp=4, extra_in_flight=1).activations == 7 * 100
    assert memory(model, "1f1b", 0, pp=4, m=2).activations == 2 * 100


def test_a_deferred_update_of_fresh_needs_a_second_gradient() -> None:
    model = profile([layer(num_parameters=10)], [0, 0])
    assert memory(model, "2bw-fresh", 1, dp=2, update_lag=1).second_gradients == 40
    assert memory(model, "2bw-fresh", 1, dp=2).second_gradients == 0


def test_recompute_keeps_the_losss_own_graph() -> None:
    loss = layer("loss", stash_bytes=70, handed_bytes=30)
    model = profile([layer(stash_bytes=500, handed_bytes=30)], [0, 0], loss=loss)
    used = memory(model, "1f1b", 1, recompute="layer")
    assert (used.activations, used.logits) == (30, 100)
    assert used.workspace == 500 - 100 + 30  # the layer runs again once the loss is done


@given(st.lists(st.tuples(*[st.integers(0, 9)] * 3), min_size=2, max_size=5))
def test_what_is_kept_is_what_the_profile_says(parts: list[tuple[int, int, int]]) -> None:
    entries = [
        layer().model_copy(
            update={
                "microbatches": (
                    layer()
                    .microbatches[0]
                    .model_copy(
                        update={
                            "stash_bytes": stash,
                            "kept_input_bytes": given,
                            "kept_output_bytes": gives,
                        }
                    ),
                )
            }
        )
        for stash, given, gives in parts
    ]
    model = profile(entries[:-1], loss=entries[-1])
    costs: list[MicrobatchProfile] = [entry.at(1) for entry in entries]
    assert kept_bytes(costs) == model.stash_bytes(0, model.num_layers, 1)


@pytest.mark.parametrize("recompute", ["none", "layer", "stage"])
def test_the_table_of_all_stages_says_the_same(recompute: str) -> None:
    loss = layer("loss", stash_bytes=70, handed_bytes=30)
    entries = [layer(num_parameters=n, stash_bytes=n, handed_bytes=3 * n) for n in (5, 20, 11)]
    model = profile(entries, [0, 1, 1, 1, 2], loss=loss)
    configuration = Configuration(3, 2, 1, 4, "2bw", recompute=recompute)  # type: ignore[arg-type]
    table = MemoryTable(model, TRAINING, 1, configuration.recompute)
    for split in ([1, 2, 2], [2, 2, 1], [3, 1, 1]):
        for stage in range(3):
            first, end = sum(split[:stage]), sum(split[: stage + 1])
            expected = stage_memory(model, TRAINING, configuration, split, stage)
            assert table.stage(configuration, stage, first, end, defers=True) == expected
            assert table.totals(configuration, stage, defers=True)[first, end] == expected.total
