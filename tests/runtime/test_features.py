"""Replicas, recompute, precision, clipping, ties and switching, beside the plain references."""

from __future__ import annotations

import copy
import itertools
from functools import partial
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import twobw
from tests.runtime.reference import train, train_stashed

SEED = 7
DELAY = {"2bw": 1, "1f1b": 0, "gpipe": 0, "no-pipeline": 0}


def adamw(named: list) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=0.01)


def build(*, tied: bool = False) -> nn.Sequential:
    """Layers with buffers, dropout, norms, one that works in place, one without parameters."""
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(6, 8),
        nn.BatchNorm1d(8),
        nn.ReLU(inplace=True),
        nn.Sequential(nn.Dropout(0.2), nn.LayerNorm(8), nn.Linear(8, 8)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
        nn.Sequential(nn.Dropout(0.1), nn.Linear(8, 8), nn.Linear(8, 1)),
    )
    if tied:
        model[5][1].weight = model[3][2].weight
    return model


def without_buffers() -> nn.Sequential:
    return nn.Sequential(*(layer for i, layer in enumerate(build()) if i not in (1, 4)))


def build_data(num_samples: int = 13, num_batches: int = 5) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    inputs = [torch.randn(num_samples, 6, generator=generator) for _ in range(num_batches)]
    return [(x, x.sum(dim=1, keepdim=True).tanh()) for x in inputs]


def run(model: nn.Sequential, data, schedule="2bw", m=2, pp=2, **options):
    """State, losses and gradient norms of a pipeline of threads."""
    options = {"optimizer": adamw, "seed": SEED, "timeout": 30} | options
    optimizer = options.pop("optimizer")
    layers = list(copy.deepcopy(model))
    with twobw.Pipeline(layers, nn.MSELoss(), optimizer, schedule, m, pp=pp, **options) as pipeline:
        results = [pipeline.train_step(*pair) for pair in data]
        state = pipeline.full_state_dict()
        if options.get("dp", 1) > 1:
            pipeline.check_replicas()
    return state, [float(r.loss) for r in results], [r.grad_norm for r in results]


def assert_equal(state: dict, expected: dict, **tolerance: float) -> None:
    """To the bit, unless a tolerance is given."""
    assert list(state) == list(expected)
    for name, tensor in expected.items():
        assert tensor.isfinite().all()
        close = tolerance or {"rtol": 0, "atol": 0}
        torch.testing.assert_close(state[name], tensor, **close, msg=partial("{}: {}".format, name))


# Summed over replicas, or over copies of a tied weight, gradients are added in another order than
# in one process. AdamW divides by the root of a mean square, so that where a gradient is near zero
# its sign decides; hence SGD with momentum where a tolerance is needed.
SUMMATION = {"rtol": 1e-4, "atol": 1e-6}


def momentum(named: list) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.02, momentum=0.9)


def sgd_of_trainable(named: list) -> torch.optim.Optimizer:
    return momentum([(name, p) for name, p in named if p.requires_grad])


class TestClipping:
    @pytest.mark.parametrize(("schedule", "pp"), [*itertools.product(DELAY, [1, 2, 3])])
    @pytest.mark.filterwarnings("ignore:2bw with")
    def test_equals_clip_grad_norm_on_the_unsplit_model(self, schedule: str, pp: int) -> None:
        model, expected_norms = build(), []
        state, losses, norms = run(model, build_data(), schedule, m=3, pp=pp, max_grad_norm=0.3)
        expected = train(
            model,
            nn.MSELoss(),
            adamw,
            build_data(),
            3,
            SEED,
            delay=DELAY[schedule],
            max_grad_norm=0.3,
            norms=expected_norms,
        )
        assert_equal(state, model.state_dict())
        assert losses == expected
        assert norms == expected_norms
        assert max(norms) > 0.3  # something was clipped

    @pytest.mark.parametrize("overlap_reduce", [True, False])
    def test_with_and_without_overlap(self, overlap_reduce: bool) -> None:
        model = build()
        data = build_data()
        state, _, _ = run(model, data, max_grad_norm=0.3, overlap_reduce=overlap_reduce)
        train(model, nn.MSELoss(), adamw, data, 2, SEED, delay=1, max_grad_norm=0.3)
        assert_equal(state, model.state_dict())


class TestTies:
    @pytest.mark.parametrize(("schedule", "pp"), [*itertools.product(DELAY, [1, 2, 3])])
    @pytest.mark.parametrize("max_grad_norm", [None, 0.3])
    @pytest.mark.filterwarnings("ignore:2bw with")
    def test_equal_the_unsplit_model(
        self, schedule: str, pp: int, max_grad_norm: float | None
    ) -> None:
        model = build(tied=True)
        data = build_data()
        options = {"optimizer": momentum, "max_grad_norm": max_grad_norm}
        state, losses, _ = run(model, data, schedule, pp=pp, **options)
        expected = train(
            model,
            nn.MSELoss(),
            momentum,
            data,
            2,
            SEED,
            delay=DELAY[schedule],
            max_grad_norm=max_grad_norm,
        )
        assert state["3.2.weight"] is state["5.1.weight"]
        assert_equal(state, model.state_dict(), **SUMMATION)
        assert losses == pytest.approx(expected, rel=1e-5)

    def test_copies_stay_equal_to_the_bit(self) -> None:
        model = build(tied=True)
        layers = list(model)
        with twobw.Pipeline(layers, nn.MSELoss(), adamw, "2bw", 2, pp=3, timeout=30) as pipeline:
            for pair in build_data(num_batches=8):
                pipeline.train_step(*pair)
            pipeline.full_state_dict()
            copies = [
                dict(rank._weights.optimizer_parameters()).get(name)
                for rank in pipeline._ranks
                for name in ("3.2.weight", "5.1.weight")
            ]
        first, second = (tensor for tensor in copies if tensor is not None)
        assert first is not second
        assert torch.equal(first, second)

    def test_a_rule_on_names_treats_copies_alike(self) -> None:
        """As in the unsplit model, the copy on the second stage has the first one's name."""

        def by_name(named: list) -> torch.optim.Optimizer:
            fast = [p for name, p in named if name.startswith("0.")]
            slow = [p for name, p in named if not name.startswith("0.")]
            groups = [{"params": fast, "lr": 0.1}, {"params": slow, "lr": 0.001}]
            return torch.optim.SGD([group for group in groups if group["params"]])

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1))
        model[1].weight = model[0].weight
        state, losses, _ = run(model, build_data(), "2bw", split=[1, 2], optimizer=by_name)
        expected = train(model, nn.MSELoss(), by_name, build_data(), 2, SEED, delay=1)
        assert_equal(state, model.state_dict(), **SUMMATION)
        assert losses == pytest.approx(expected, rel=1e-5)


class TestReplicas:
    @pytest.mark.parametrize(
        ("schedule", "pp", "dp"),
        [
            *[(name, *size) for name in DELAY for size in [(1, 2), (2, 2), (2, 3), (3, 2)]],
            ("weight-stashing", 1, 2),  # at one stage, plain training by microbatch
        ],
    )
    @pytest.mark.filterwarnings("ignore:2bw with")
    def test_equal_one_process_with_all_microbatches(self, schedule: str, pp: int, dp: int) -> None:
        model = nn.Sequential(*(layer for i, layer in enumerate(build()) if i != 1))
        data = build_data(num_samples=2 * dp * 2 + 1)  # uneven: one replica has a sample more
        m = 1 if schedule == "weight-stashing" else 2
        state, losses, _ = run(model, data, schedule, m=m, pp=pp, dp=dp, optimizer=momentum)
        delay = DELAY.get(schedule, 0)
        expected = train(model, nn.MSELoss(), momentum, data, m * dp, SEED, delay=delay)
        parameters = dict(model.named_parameters())
        assert_equal({name: state[name] for name in parameters}, parameters, **SUMMATION)
        assert losses == pytest.approx(expected, rel=1e-5)

    @pytest.mark.parametrize("max_grad_norm", [None, 0.3])
    @pytest.mark.parametrize("precision", ["fp32", "bf16"])
    def test_sharded_optimizer_state_changes_nothing(
        self, max_grad_norm: float | None, precision: str
    ) -> None:
        options = {"max_grad_norm": max_grad_norm, "precision": precision, "dp": 2}
        held: list[int] = []

        def counting(named: list) -> torch.optim.Optimizer:
            held.append(sum(p.numel() for _, p in named))
            return adamw(named)

        data = build_data(num_samples=8)
        whole, losses, _ = run(build(), data, optimizer=counting, **options)
        whole_held, held[:] = sum(held), []
        state, shard_losses, _ = run(
            build(), data, optimizer=counting, shard_optimizer=True, **options
        )
        assert_equal(state, whole)
        assert losses == shard_losses
        assert sum(held) == whole_held / 2
        assert max(held) < 0.7 * whole_held / 2

    @pytest.mark.parametrize("m", [1, 2, 4])
    @pytest.mark.parametrize("pp", [1, 2])
    def test_ignored_targets_falling_unevenly(self, pp: int, m: int) -> None:
        """The mean is over the targets that count, of all replicas."""

        def sum_and_weight(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
            loss = nn.functional.cross_entropy(output, target, reduction="sum")
            return loss, (target != -100).sum()

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
        inputs = build_data(num_samples=9)[0][0]
        targets = torch.tensor([0, -100, -100, -100, -100, 2, 1, 0, 1])
        layers = list(copy.deepcopy(model))
        with twobw.Pipeline(
            layers, sum_and_weight, momentum, "1f1b", m, pp=pp, dp=2, timeout=30
        ) as pipeline:
            result = pipeline.train_step(inputs, targets)
            state = pipeline.full_state_dict()
        optimizer = momentum(list(model.named_parameters()))
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        assert float(result.loss) == pytest.approx(loss.item(), rel=1e-6)
        assert_equal(state, model.state_dict(), **SUMMATION)

    @pytest.mark.parametrize(
        "options", [{"dp": 2}, {"dp": 2, "shard_optimizer": True}, {}], ids=str
    )
    def test_parameters_of_several_dtypes(self, options: dict) -> None:
        class Casts(nn.Module):
            def __init__(self, dtype: torch.dtype) -> None:
                super().__init__()
                self.linear = nn.Linear(6, 6, dtype=dtype)

            def forward(self, x: Tensor) -> Tensor:
                return self.linear(x.to(self.linear.weight.dtype))

        torch.manual_seed(0)
        floats = (torch.float32, torch.float64, torch.float32)
        model = nn.Sequential(*(Casts(dtype) for dtype in floats))
        data = [(x, x.sin()) for x, _ in build_data(num_samples=8)]
        state, _, norms = run(
            model, data, pp=2, split=[1, 2], optimizer=momentum, max_grad_norm=0.3, **options
        )
        optimizer = momentum(list(model.named_parameters()))
        weights = [copy.deepcopy(model.state_dict())]
        for k, (x, y) in enumerate(data):
            older = copy.deepcopy(model)
            older.load_state_dict(weights[max(k - 1, 0)])
            nn.functional.mse_loss(older(x), y).backward()
            for parameter, ran in zip(model.parameters(), older.parameters(), strict=True):
                parameter.grad = ran.grad
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            assert norms[k] == pytest.approx(norm.item(), rel=1e-5)
            optimizer.step()
            weights.append(copy.deepcopy(model.state_dict()))
        assert_equal(state, model.state_dict(), **SUMMATION)

    def test_a_tied_parameter_in_double_precision_that_one_stage_does_not_use(self) -> None:
        class Skips(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return x * 1.0

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), Skips(6, 6)).double()
        model[2].weight = model[0].weight
        model[2].bias.requires_grad_(False)
        data = [(x.double(), x.double().sin()) for x, _ in build_data()]
        state, losses, _ = run(model, data, pp=2, split=[1, 2], optimizer=momentum)
        optimizer = sgd_of_trainable
        assert train(model, nn.MSELoss(), optimizer, data, 2, SEED, delay=1) == losses
        assert_equal(state, model.state_dict())

    def test_a_parameter_that_no_replica_uses_has_no_gradient(self) -> None:
        class Skips(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.used, self.unused = nn.Linear(6, 1), nn.Linear(6, 1)

            def forward(self, x: Tensor) -> Tensor:
                return self.used(x)

        model = nn.Sequential(nn.Linear(6, 6), Skips())
        state, _, _ = run(model, build_data(), dp=2)
        assert torch.equal(state["1.unused.weight"], model[1].unused.weight)  # no weight decay

    @pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
    @pytest.mark.parametrize("pp", [1, 2])
    def test_sparse_gradients(self, pp: int) -> None:
        """SparseAdam changes those rows only that some replica's samples have."""

        def optimizers(named: list) -> list[torch.optim.Optimizer]:
            tables = [p for name, p in named if name == "0.weight"]
            rest = [p for name, p in named if name != "0.weight"]
            made = [(torch.optim.SparseAdam, tables), (torch.optim.SGD, rest)]
            return [kind(held, lr=0.01) for kind, held in made if held]

        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(9, 6, sparse=True), nn.Linear(6, 1))
        rows = [[0, 1, 1, 2, 2, 3], [1, 4, 4, 4, 5, 5], [0, 1, 2, 6, 6, 7]]
        data = [(torch.tensor(r), torch.ones(6, 1)) for r in rows]
        layers = list(copy.deepcopy(model))
        with twobw.Pipeline(
            layers, nn.MSELoss(), optimizers, "1f1b", 1, pp=pp, dp=2, timeout=30
        ) as pipeline:
            for pair in data:
                pipeline.train_step(*pair)
            state = pipeline.full_state_dict()
        made, start = optimizers(list(model.named_parameters())), model[0].weight[8].clone()
        for x, y in data:
            model.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            for optimizer in made:
                optimizer.step()
        assert_equal(state, model.state_dict(), **SUMMATION)
        assert torch.equal(state["0.weight"][8], start)

    def test_sparse_gradients_on_one_replica_and_dense_on_the_other(self) -> None:
        class Mix(nn.Embedding):
            def forward(self, x: Tensor) -> Tensor:
                return nn.functional.embedding(x, self.weight, sparse=bool(x[0] < 5))

        torch.manual_seed(0)
        model = nn.Sequential(Mix(9, 6), nn.Linear(6, 1))
        data = [(torch.tensor([0, 1, 7, 8]), torch.ones(4, 1))]
        state, losses, _ = run(model, data, "1f1b", 1, pp=1, dp=2, optimizer=momentum)
        optimizer = momentum(list(model.named_parameters()))
        model[0].forward = partial(nn.functional.embedding, weight=model[0].weight)
        loss = nn.functional.mse_loss(model(data[0][0]), data[0][1])
        loss.backward()
        optimizer.step()
        assert losses == [pytest.approx(loss.item())]
        assert_equal(state, model.state_dict(), **SUMMATION)

    @pytest.mark.parametrize("options", [{"max_grad_norm": 1.0}, {"precision": "fp16"}], ids=str)
    def test_sparse_gradients_that_must_be_dense_are_refused(self, options: dict) -> None:
        model = nn.Sequential(nn.Embedding(9, 6, sparse=True), nn.Linear(6, 1))
        data = [(torch.tensor([0, 1]), torch.ones(2, 1))]
        with pytest.raises(ValueError, match="a gradient is sparse, which does not go with"):
            run(model, data, pp=1, schedule="1f1b", **options)

    def test_replicas_that_differ_are_found(self) -> None:
        layers = list(build())
        with twobw.Pipeline(
            layers, nn.MSELoss(), adamw, "1f1b", 2, pp=2, dp=2, timeout=30
        ) as pipeline:
            pipeline.train_step(*build_data()[0])
            pipeline.check_replicas()
            parameters = pipeline._ranks[3]._weights.optimizer_parameters()
            parameters[0][1].data[0] += 1e-3
            with pytest.raises(RuntimeError, match="replicas of stage 1 have different weights"):
                pipeline.check_replicas()


class TestWeightStashing:
    @pytest.mark.parametrize(
        "options", [{"recompute": "layer"}, {"recompute": "stage"}, {"max_grad_norm": 0.3}], ids=str
    )
    @pytest.mark.parametrize("pp", [2, 3])
    def test_equals_the_reference(self, pp: int, options: dict) -> None:
        model, data = build(), build_data()
        split = [6 - 2 * (pp - 1), *[2] * (pp - 1)]
        state, losses, _ = run(model, data, "weight-stashing", pp=pp, split=split, **options)
        clipping = {k: v for k, v in options.items() if k == "max_grad_norm"}
        expected = train_stashed(model, nn.MSELoss(), adamw, data, 2, split, SEED, **clipping)
        assert_equal(state, model.state_dict())
        assert losses == expected

    def test_sums_and_weights_of_replicas_are_refused(self) -> None:
        """Its updates come before the other stages can know the weights."""

        def sum_and_weight(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
            return (output - target).square().sum(), torch.tensor(float(len(output)))

        layers = [nn.Linear(6, 4), nn.Linear(4, 1)]
        with (
            twobw.Pipeline(
                layers, sum_and_weight, adamw, "weight-stashing", 2, pp=2, dp=2, timeout=30
            ) as pipeline,
            pytest.raises(ValueError, match="Give the mean, or use another schedule"),
        ):
            assert [pipeline.train_step(*pair) for pair in build_data()]


class TestPrecision:
    @pytest.mark.parametrize("precision", ["bf16", "fp16"])
    @pytest.mark.parametrize(
        ("schedule", "pp"), [("2bw", 2), ("2bw", 3), ("1f1b", 2), ("gpipe", 3)]
    )
    @pytest.mark.parametrize("max_grad_norm", [None, 0.3])
    def test_equals_the_reference(
        self, precision: str, schedule: str, pp: int, max_grad_norm: float | None
    ) -> None:
        """Bit for bit, also through fp16's overflows, which the targets provoke."""
        model = without_buffers()
        scale = 12.0 if precision == "fp16" else 1.0
        data = [(x, y * scale) for x, y in build_data(num_batches=7)]
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        options = {"precision": precision, "max_grad_norm": max_grad_norm}
        state, losses, norms = run(model, data, schedule, pp=pp, **options)
        expected = train(
            model,
            nn.MSELoss(),
            adamw,
            data,
            2,
            SEED,
            delay=DELAY[schedule],
            dtype=dtype,
            max_grad_norm=max_grad_norm,
        )
        assert_equal(state, model.state_dict())
        assert losses == expected
        if precision == "fp16" and max_grad_norm is not None:
            assert None in norms  # an update was skipped
            assert norms[-1] is not None  # and not all

    def test_a_skipped_update_is_told(self) -> None:
        layers, data = list(without_buffers()), build_data(num_batches=6)
        with twobw.Pipeline(
            layers, nn.MSELoss(), adamw, "2bw", 2, pp=2, precision="fp16", timeout=30
        ) as pipeline:
            results = [pipeline.train_step(x, y * 12) for x, y in data]
            assert results[-1].is_skipped is None  # not updated yet
            pipeline.drain()
        skipped = [result.is_skipped for result in results]
        assert skipped[0] is True
        assert skipped[-1] is False

    def test_weights_are_kept_in_two_16_bit_copies_and_fp32_main_weights(self) -> None:
        with twobw.Pipeline(
            list(without_buffers()),
            nn.MSELoss(),
            adamw,
            "2bw",
            2,
            pp=2,
            precision="bf16",
            timeout=30,
        ) as pipeline:
            pipeline.train_step(*build_data()[0])
            pipeline.drain()
            weights = pipeline._ranks[0]._weights
            dtypes = [{p.dtype for p in slot} for slot in weights._slots]
            assert dtypes == [{torch.bfloat16}, {torch.bfloat16}]
            assert {p.dtype for _, p in weights.optimizer_parameters()} == {torch.float32}
            state = pipeline.full_state_dict()
        assert {tensor.dtype for tensor in state.values()} == {torch.float32}

    def test_batch_norm_keeps_fp32(self) -> None:
        state, losses, _ = run(build(), build_data(), precision="bf16")
        assert state["1.running_mean"].dtype == torch.float32
        assert all(loss == loss for loss in losses)


class TestSwitching:
    NAMES = ("2bw", "2bw-fresh", "paci", "1f1b", "gpipe", "no-pipeline", "weight-stashing")
    CASES: ClassVar = [
        (*names, corrections)
        for names in itertools.permutations(NAMES, 2)
        for corrections in ({}, {"max_grad_norm": 0.3}, {"precision": "bf16"}, {"lookahead": 0.7})
        if not ("lookahead" in corrections and {"paci", "weight-stashing"} & set(names))  # refused
    ]
    LAG: ClassVar = {"2bw-fresh": {"update_lag": 1}}

    @pytest.mark.parametrize(("first", "second", "corrections"), CASES, ids=str)
    def test_equals_a_new_pipeline_from_there(
        self, first: str, second: str, corrections: dict
    ) -> None:
        """Of SGD without momentum, which has no state to carry over."""

        def sgd(named: list) -> torch.optim.Optimizer:
            return torch.optim.SGD(named, lr=0.02)

        torch.manual_seed(0)
        layers = [nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 1)]
        options = {"pp": 2, "timeout": 30, **corrections}
        data = build_data(num_batches=6)
        with twobw.Pipeline(
            copy.deepcopy(layers), nn.MSELoss(), sgd, first, 2, **options, **self.LAG.get(first, {})
        ) as pipeline:
            for pair in data[:3]:
                pipeline.train_step(*pair)
            middle = pipeline.full_state_dict()
            pipeline.set_schedule(second, 3, **self.LAG.get(second, {}))
            results = [pipeline.train_step(*pair) for pair in data[3:]]
            state = pipeline.full_state_dict()
            assert [r.batch for r in results] == [3, 4, 5]
        nn.Sequential(*layers).load_state_dict(middle)
        with twobw.Pipeline(
            layers, nn.MSELoss(), sgd, second, 3, **options, **self.LAG.get(second, {})
        ) as pipeline:
            for pair in data[3:]:
                pipeline.train_step(*pair)
            assert_equal(state, pipeline.full_state_dict())

    def test_optimizer_state_is_carried_over(self) -> None:
        model, data = build(), build_data(num_batches=6)
        layers = list(copy.deepcopy(model))
        with twobw.Pipeline(layers, nn.MSELoss(), adamw, "1f1b", 2, pp=2, seed=SEED) as pipeline:
            for pair in data[:3]:
                pipeline.train_step(*pair)
            pipeline.set_schedule("gpipe")
            for pair in data[3:]:
                pipeline.train_step(*pair)
            state = pipeline.full_state_dict()
        train(model, nn.MSELoss(), adamw, data, 2, SEED, delay=0)
        assert_equal(state, model.state_dict())

    def test_a_schedule_that_does_not_fit_leaves_the_old_one(self) -> None:
        with twobw.Pipeline(list(build()), nn.MSELoss(), adamw, "1f1b", 2, pp=2) as pipeline:
            with pytest.raises(ValueError, match="did you mean"):
                pipeline.set_schedule("2bx")
            assert pipeline.schedule == "1f1b"


def test_forward_needs_outputs_by_sample() -> None:
    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean()

    layers = [nn.Linear(6, 1), Mean()]
    with (
        twobw.Pipeline(layers, nn.MSELoss(), adamw, "2bw", 2, pp=2, timeout=30) as pipeline,
        pytest.raises(ValueError, match="a tensor without dimensions"),
    ):
        pipeline.forward(torch.ones(4, 6))
    with twobw.Pipeline(
        layers, lambda mean, _: mean, adamw, "2bw", 2, pp=2, timeout=30
    ) as pipeline:
        with pytest.raises(ValueError, match="a tensor without dimensions"):
            pipeline.forward(torch.ones(4, 6))
        assert float(pipeline.train_step(torch.ones(4, 6), torch.ones(4, 1)).loss) < 10


def test_forward_gives_the_outputs_of_the_whole_batch() -> None:
    layers = list(without_buffers())
    inputs, targets = build_data()[0]
    with twobw.Pipeline(layers, nn.MSELoss(), adamw, "2bw", 2, pp=2, dp=2, timeout=30) as pipeline:
        pipeline.train_step(inputs, targets)
        outputs = pipeline.forward(inputs, num_microbatches=3)
        state = pipeline.full_state_dict()
    model = without_buffers()
    model.load_state_dict(state)
    torch.testing.assert_close(outputs, model.eval()(inputs))


# Those that torch has, but for LBFGS, which evaluates the loss itself, SparseAdam, which takes
# sparse gradients, and Muon, which takes matrices (tests/training/test_optimizer.py).
ANY_OPTIMIZER = [
    "ASGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
]


@pytest.mark.parametrize("name", ANY_OPTIMIZER)
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_any_optimizer(schedule: str, name: str) -> None:
    def optimizer(named: list) -> torch.optim.Optimizer:
        return getattr(torch.optim, name)(named, lr=0.01)

    model, data = build(), build_data()
    state, losses, _ = run(model, data, schedule, pp=3, optimizer=optimizer)
    assert train(model, nn.MSELoss(), optimizer, data, 2, SEED, delay=DELAY[schedule]) == losses
    assert_equal(state, model.state_dict())
