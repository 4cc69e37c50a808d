"""The validation loss: which samples each replica takes, and when a loss is the best."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.config.files import write
from twobw.config import Config, load_config
from twobw.training.data import DataError, TextData
from twobw.training.evaluation import Evaluation
from twobw.training.placement import Placement

CPU = torch.device("cpu")


class FakePipeline:
    """Gives the losses it was told to, and notes what it was asked."""

    def __init__(self, losses: list[float]) -> None:
        self.losses = losses
        self.asked: list[tuple[Tensor, Tensor, int]] = []

    def evaluate(self, inputs: Tensor, targets: Tensor, num_microbatches: int) -> float:
        self.asked.append((inputs, targets, num_microbatches))
        return self.losses.pop(0)


def config_for(folder: Path, dp: int = 1, **training: object) -> Config:
    folder.mkdir(exist_ok=True)
    return load_config(write(folder, training=training, parallel={"dp": dp, "num_microbatches": 3}))


def data_for(folder: Path, num_windows: int) -> TextData:
    text = folder / "text.txt"
    text.write_text("".join(chr(97 + n % 26) for n in range(2 * (32 * num_windows + 1))))
    return TextData([text], sequence_length=32, validation_fraction=0.5)


def evaluation(
    config: Config, data: TextData, pipeline: FakePipeline, replica: int = 0
) -> Evaluation:
    placement = Placement(replica, config.parallel.dp, True, True, CPU)
    return Evaluation(config, data, pipeline, placement)  # type: ignore[arg-type]


def test_the_loss_is_the_mean_over_the_batches(tmp_path: Path) -> None:
    config = config_for(tmp_path, evaluation_batches=2, evaluation_batch_size=5)
    pipeline = FakePipeline([2.0, 3.0])
    assert evaluation(config, data_for(tmp_path, 20), pipeline).loss() == 2.5
    assert [(len(x), len(y), m) for x, y, m in pipeline.asked] == [(5, 5, 3), (5, 5, 3)]


def test_replicas_take_their_parts_in_order(tmp_path: Path) -> None:
    config = config_for(tmp_path, 2, evaluation_batches=1, evaluation_batch_size=7)
    data = data_for(tmp_path, 20)
    parts = []
    for replica in (0, 1):
        pipeline = FakePipeline([2.0])
        evaluation(config, data, pipeline, replica).loss()
        parts += pipeline.asked
    ((inputs, targets),) = data.validation_batches(1, 7)
    assert [len(x) for x, _, _ in parts] == [4, 3]
    assert torch.equal(torch.cat([x for x, _, _ in parts]), inputs)
    assert torch.equal(torch.cat([y for _, y, _ in parts]), targets)


@pytest.mark.parametrize(
    ("dp", "settings", "num_windows", "expected"),
    [
        (1, {}, 20, 3),  # as in training
        (1, {"evaluation_microbatches": 5}, 20, 5),
        (1, {"evaluation_batch_size": 2}, 20, 2),  # no more than there are samples
        (2, {}, 5, 2),  # of 5 samples, the smaller part has 2
    ],
)
def test_microbatches(
    tmp_path: Path, dp: int, settings: dict[str, object], num_windows: int, expected: int
) -> None:
    pipeline = FakePipeline([1.0] * 8)
    config = config_for(tmp_path, dp, **settings)
    evaluation(config, data_for(tmp_path, num_windows), pipeline).loss()
    assert {count for _, _, count in pipeline.asked} == {expected}


def test_without_batches_there_is_no_loss(tmp_path: Path) -> None:
    config = config_for(tmp_path, 2, evaluation_batches=0)
    chosen = evaluation(config, data_for(tmp_path, 1), FakePipeline([]))
    assert chosen.loss() is None
    assert not chosen.is_best(None)


def test_less_validation_text_than_replicas_is_refused(tmp_path: Path) -> None:
    config = config_for(tmp_path, 2)
    with pytest.raises(DataError, match=r"has 1 samples, fewer than parallel\.dp = 2"):
        evaluation(config, data_for(tmp_path, 1), FakePipeline([]))


def test_a_loss_is_best_if_lower_than_all_before(tmp_path: Path) -> None:
    chosen = evaluation(config_for(tmp_path), data_for(tmp_path, 20), FakePipeline([]))
    losses = [math.nan, 3.0, 3.0, 2.0, math.nan, 2.5, 1.0]
    assert [chosen.is_best(loss) for loss in losses] == [
        False,
        True,
        False,
        True,
        False,
        False,
        True,
    ]
