"""The contestants of `throughput.py`: each trains the same GPT on the same batches.

Every class here is built in its own processes (`harness.Team`), answers `turn`, and is idle
between turns. In all of them a batch is the same work: forward and backward of every microbatch,
the gradient of the mean loss over the batch, one AdamW step.
"""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from harness import Seat
from torch import Tensor, nn

import twobw
from twobw.models.gpt import gpt_layers, loss_fn
from twobw.models.sizes import gpt_config

MODEL = gpt_config("gpt-bench")
SPLIT = [5, 5]
MICROBATCH_SIZE = 4
SEED = 0
_NUM_DIFFERENT_BATCHES = 8


class SupportsFloat(Protocol):
    def __float__(self) -> float: ...


@dataclass(frozen=True)
class Turn:
    """What one process did in a turn.

    Attributes:
        seconds: from the end of the last untimed batch to the end of the last timed one.
        cpu_seconds: processor time of the whole turn.
        losses: of all the turn's batches; empty where they are not known.
    """

    seconds: float
    cpu_seconds: float
    losses: list[float]


class Contestant:
    """What all contestants have in common.

    Args:
        seat: this process's place.
        num_microbatches: of a batch.
    """

    def __init__(self, seat: Seat, num_microbatches: int) -> None:
        self.seat = seat
        self.num_microbatches = num_microbatches
        self.batch = 0
        generator = torch.Generator().manual_seed(SEED)
        shape = (num_microbatches * MICROBATCH_SIZE, MODEL.sequence_length + 1)
        texts = [
            torch.randint(MODEL.vocab_size, shape, generator=generator)
            for _ in range(_NUM_DIFFERENT_BATCHES)
        ]
        self._data = [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in texts]

    def train(self, inputs: Tensor, targets: Tensor) -> SupportsFloat | None:
        """One batch; its loss where this process knows it."""
        raise NotImplementedError

    def turn(self, num_untimed: int, num_timed: int) -> Turn:
        """Train ``num_untimed`` batches, then ``num_timed`` by the clock, without a drain."""
        cpu_start = time.process_time()
        losses = [self._next() for _ in range(num_untimed)]
        start = time.perf_counter()
        losses += [self._next() for _ in range(num_timed)]
        seconds = time.perf_counter() - start
        self.finish()
        known = [float(loss) for loss in losses if loss is not None]
        return Turn(seconds, time.process_time() - cpu_start, known)

    def finish(self) -> None:
        """After the last timed batch."""

    def _next(self) -> SupportsFloat | None:
        inputs, targets = self._data[self.batch % len(self._data)]
        self.batch += 1
        return self.train(inputs, targets)


class TwoBW(Contestant):
    """This project. ``train_step`` returns after the batch's last forward on this rank.

    So does the one that the clock starts at: between the two lie the forwards, backwards and
    updates of exactly the timed batches, and nothing is drained.
    """

    def __init__(
        self, seat: Seat, num_microbatches: int, schedule: str, extra_in_flight: int = 0
    ) -> None:
        super().__init__(seat, num_microbatches)
        seat.join()
        self._pipeline = twobw.Pipeline(
            build_layers(),
            loss_fn,
            make_optimizer,
            schedule=schedule,
            num_microbatches=num_microbatches,
            split=SPLIT,
            extra_in_flight=extra_in_flight,
        )

    def train(self, inputs: Tensor, targets: Tensor) -> SupportsFloat:
        return self._pipeline.train_step(inputs, targets).loss

    def drain(self) -> None:
        """Finish what is in flight, by no clock."""
        self._pipeline.drain()


class TorchPipelining(Contestant):
    """`torch.distributed.pipelining`, used as its documentation shows."""

    def __init__(self, seat: Seat, num_microbatches: int, schedule: str) -> None:
        super().__init__(seat, num_microbatches)
        seat.join()
        from torch.distributed import pipelining

        start = sum(SPLIT[: seat.rank])
        module = nn.Sequential(*build_layers()[start : start + SPLIT[seat.rank]])
        stage = pipelining.PipelineStage(module, seat.rank, seat.size, torch.device("cpu"))
        # Gradients of the microbatches' mean losses are summed, then divided by their number
        # (scale_grads, the default): the gradient of the mean over the batch.
        self._schedule = getattr(pipelining, schedule)(stage, num_microbatches, loss_fn)
        self._optimizer = make_optimizer(module.named_parameters())

    def train(self, inputs: Tensor, targets: Tensor) -> SupportsFloat | None:
        losses: list[Tensor] = []
        self._optimizer.zero_grad()
        # return_outputs=False: the logits of a batch are not gathered, as nobody asks for them.
        if self.seat.rank == 0:
            self._schedule.step(inputs, return_outputs=False)
        else:
            self._schedule.step(target=targets, losses=losses, return_outputs=False)
        self._optimizer.step()
        return torch.stack(losses).mean().detach() if losses else None


class DeepSpeed(Contestant):
    """DeepSpeed's pipeline engine; its schedule is 1F1B with a flush."""

    def __init__(self, seat: Seat, num_microbatches: int) -> None:
        super().__init__(seat, num_microbatches)
        os.environ.update(
            DS_ACCELERATOR="cpu",
            DS_BUILD_OPS="0",
            RANK=str(seat.rank),
            LOCAL_RANK=str(seat.rank),
            WORLD_SIZE=str(seat.size),
            LOCAL_SIZE=str(seat.size),
        )
        seat.join()
        with contextlib.redirect_stdout(io.StringIO()):  # it reports its whole configuration
            self._engine = self._build()

    def _build(self) -> Any:
        import deepspeed
        from deepspeed.pipe import PipelineModule

        deepspeed.utils.logger.setLevel("ERROR")
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
        module = PipelineModule(
            build_layers(), self.seat.size, loss_fn=loss_fn, partition_method="uniform"
        )
        if module.parts != [0, SPLIT[0], sum(SPLIT)]:
            raise RuntimeError(f"DeepSpeed splits the layers at {module.parts}, not as {SPLIT}")
        engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=make_optimizer(module.named_parameters()),
            config={
                "train_micro_batch_size_per_gpu": MICROBATCH_SIZE,
                "gradient_accumulation_steps": self.num_microbatches,
                "gradient_clipping": 0.0,  # 1.0 by default
                "steps_per_print": 10**9,
            },
        )
        return engine

    def train(self, inputs: Tensor, targets: Tensor) -> SupportsFloat:
        microbatches = zip(
            inputs.split(MICROBATCH_SIZE), targets.split(MICROBATCH_SIZE), strict=True
        )
        loss: Tensor = self._engine.train_batch(data_iter=microbatches)
        return loss.detach()


class Ideal(Contestant):
    """One process of a group that does not communicate: it trains the whole model alone.

    Args:
        seat: this process's place.
        num_microbatches: of a batch, gradients accumulated.
        num_finished: shared count of processes past their last timed batch. Each goes on training
            until all are, so that none is timed while another rests.
    """

    def __init__(self, seat: Seat, num_microbatches: int, num_finished: Any) -> None:
        super().__init__(seat, num_microbatches)
        torch.set_num_threads(1)
        self._num_finished = num_finished
        self._num_turns = 0
        self._model = nn.Sequential(*build_layers())
        self._optimizer = make_optimizer(self._model.named_parameters())

    def train(self, inputs: Tensor, targets: Tensor) -> SupportsFloat:
        total = torch.zeros(())
        self._optimizer.zero_grad()
        for x, y in zip(inputs.split(MICROBATCH_SIZE), targets.split(MICROBATCH_SIZE), strict=True):
            loss = loss_fn(self._model(x), y) / self.num_microbatches
            loss.backward()
            total += loss.detach()
        self._optimizer.step()
        return total

    def finish(self) -> None:
        self._num_turns += 1
        with self._num_finished.get_lock():
            self._num_finished.value += 1
        while self._num_finished.value < self._num_turns * self.seat.size:
            self._next()


def build_layers() -> list[nn.Module]:
    """The whole model, the same in every process."""
    torch.manual_seed(SEED)
    return [build() for build in gpt_layers(MODEL)]


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """The same AdamW for all."""
    return torch.optim.AdamW(parameters, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)


CONTESTANTS: dict[str, tuple[Callable[..., Contestant], dict[str, str]]] = {
    "2bw": (TwoBW, {"schedule": "2bw"}),
    "1f1b": (TwoBW, {"schedule": "1f1b"}),
    "gpipe": (TwoBW, {"schedule": "gpipe"}),
    "torch 1F1B": (TorchPipelining, {"schedule": "Schedule1F1B"}),
    "torch GPipe": (TorchPipelining, {"schedule": "ScheduleGPipe"}),
    "DeepSpeed": (DeepSpeed, {}),
    "ideal": (Ideal, {}),
}
