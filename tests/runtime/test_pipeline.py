"""What a user may pass to `Pipeline`, and what is refused."""

from __future__ import annotations

import copy
import math
import threading
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import twobw
from tests.runtime.reference import train_delayed, train_plain
from twobw.core.generators import SCHEDULES

EVERY_SCHEDULE = ["2bw", "1f1b", "gpipe", "weight-stashing", "no-pipeline"]


def sgd(named: list) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1)


def linears(*sizes: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(a, b) for a, b in pairwise(sizes)]


def make(layers, loss_fn=nn.functional.mse_loss, optimizer=sgd, schedule="1f1b", **options):
    options = {"num_microbatches": 2, "pp": 2, "timeout": 30} | options
    return twobw.Pipeline(layers, loss_fn, optimizer, schedule, **options)


def train_on(pipeline: twobw.Pipeline, data) -> None:
    for pair in data:
        pipeline.train_step(*pair)
    pipeline.drain()


def copy_of(layers: list[nn.Module]) -> nn.Sequential:
    return nn.Sequential(*copy.deepcopy(layers))


def assert_trains_like(layers: list[nn.Module], data, loss_fn=nn.functional.mse_loss, **options):
    model = copy_of(layers)
    m = options.get("num_microbatches", 2)
    train = train_delayed if options.get("schedule") == "2bw" else train_plain
    losses = train(model, loss_fn, sgd, data, m)
    with make(layers, loss_fn, **options) as pipeline:
        results = [pipeline.train_step(*pair) for pair in data]
        state = pipeline.full_state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(state[name], tensor), name
    assert [float(result.loss) for result in results] == losses


def pairs(*shapes: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(shape, generator=generator), torch.randn(shape[0], 1, generator=generator))
        for shape in shapes
    ]


class TestData:
    def test_uneven_batches_and_changing_shapes(self) -> None:
        data = pairs((5, 4), (7, 4), (2, 4), (7, 4), (5, 4))
        assert_trains_like(linears(4, 3, 1), data, schedule="2bw")

    def test_one_microbatch(self) -> None:
        assert_trains_like(linears(4, 3, 1), pairs((5, 4), (1, 4)), num_microbatches=1)

    def test_float64(self) -> None:
        data = [(x.double(), y.double()) for x, y in pairs((5, 4), (5, 4))]
        assert_trains_like([layer.double() for layer in linears(4, 3, 1)], data)

    def test_a_loss_that_gives_sum_and_weight(self) -> None:
        """With ignored targets, falling unevenly: the mean is over those that count."""
        layers = linears(4, 6, 3)
        targets = torch.tensor([0, -100, -100, -100, 2, 1, 0])
        inputs = pairs((7, 4))[0][0]

        def sum_and_weight(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
            loss = nn.functional.cross_entropy(output, target, reduction="sum")
            return loss, (target != -100).sum()

        model = copy_of(layers)
        optimizer = sgd(list(model.named_parameters()))
        expected = nn.functional.cross_entropy(model(inputs), targets)
        expected.backward()
        optimizer.step()
        with make(layers, sum_and_weight) as pipeline:
            result = pipeline.train_step(inputs, targets)
            state = pipeline.full_state_dict()
        assert float(result.loss) == pytest.approx(expected.item(), rel=1e-6)
        for name, tensor in model.state_dict().items():  # summed in another order
            torch.testing.assert_close(state[name], tensor, rtol=1e-5, atol=1e-7)

    @pytest.mark.parametrize(("schedule", "dp"), [("1f1b", 1), ("1f1b", 2), ("weight-stashing", 1)])
    def test_a_batch_in_which_nothing_counts_changes_nothing(self, schedule: str, dp: int) -> None:
        layers = linears(4, 6, 3)
        before = copy_of(layers).state_dict()

        def ignoring(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
            loss = nn.functional.cross_entropy(output, target, reduction="sum")
            return loss, (target != -100).sum()

        with make(layers, ignoring, schedule=schedule, dp=dp) as pipeline:
            result = pipeline.train_step(torch.ones(8, 4), torch.full((8,), -100))
            state = pipeline.full_state_dict()
        assert math.isnan(float(result.loss))
        assert all(torch.equal(state[name], before[name]) for name in before)


class TestLayers:
    def test_tuples_of_mixed_tensors(self) -> None:
        """Integers, booleans, a tensor without gradient, an unused one and None pass through."""

        class Split(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(4, 4)
                self.unused = nn.Linear(4, 4)

            def forward(self, x: Tensor):
                rows = torch.arange(len(x))
                return self.linear(x), rows, x > 0, x.detach() * 2, self.unused(x), None

        class Join(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(4, 1)

            def forward(self, parts):
                x, rows, mask, constant, _, nothing = parts
                assert nothing is None
                assert rows.dtype == torch.int64
                assert not constant.requires_grad
                return self.linear(x * mask + constant + rows[:, None])

        torch.manual_seed(0)
        layers = [Split(), Join()]
        assert_trains_like(layers, pairs((5, 4), (5, 4), (6, 4)), schedule="2bw")

    def test_outputs_that_are_views(self) -> None:
        class Views(nn.Module):
            def forward(self, x: Tensor):
                return x.t()[:2].t(), x[:, 1:]

        class Join(nn.Module):
            def forward(self, parts):
                return (parts[0] * parts[1]).sum(1, keepdim=True)

        assert_trains_like([*linears(4, 3), Views(), Join()], pairs((4, 4), (4, 4)), split=[2, 1])

    def test_a_first_layer_that_works_in_place(self) -> None:
        layers = [*linears(4, 3), nn.ReLU(inplace=True), *linears(3, 1)]
        assert_trains_like(layers, pairs((4, 4), (4, 4)), split=[1, 2])

    @pytest.mark.parametrize("schedule", ["2bw", "gpipe"])
    def test_inputs_that_the_first_layer_works_in_place_on(self, schedule: str) -> None:
        layers = [nn.ReLU(inplace=True), *linears(4, 3, 1)]
        assert_trains_like(layers, pairs((4, 4), (4, 4), (4, 4)), schedule=schedule)

    def test_a_stage_may_change_what_it_receives(self) -> None:
        """Though the sender needs it: a sigmoid's backward is taken from its output."""

        class Doubled(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x.mul_(2)

        layers = [nn.Sequential(*linears(4, 3), nn.Sigmoid()), Doubled(), *linears(3, 1)]
        data = pairs((4, 4), (4, 4))
        model = nn.Sequential(copy_of([layers[0]]), copy_of(linears(3, 1)))
        with torch.no_grad():
            model[1][0].weight.mul_(2)  # in place of doubling its input

        def scaled(named: list) -> torch.optim.Optimizer:  # and so its gradient is halved
            groups = [{"params": [p], "lr": 0.4 if n == "1.0.weight" else 0.1} for n, p in named]
            return torch.optim.SGD(groups)

        train_plain(model, nn.functional.mse_loss, scaled, data, 2)
        with make(layers, split=[1, 2]) as pipeline:
            for pair in data:
                pipeline.train_step(*pair)
            state = pipeline.full_state_dict()
        torch.testing.assert_close(state["2.weight"] * 2, model[1][0].weight.data)
        torch.testing.assert_close(state["0.0.weight"], model[0][0][0].weight.data)

    @pytest.mark.parametrize("frozen", [0, 1, 2])
    def test_frozen_stages(self, frozen: int) -> None:
        """Their optimizer is never made; gradients still pass through."""
        layers = linears(4, 3, 2, 1)
        layers[frozen].requires_grad_(False)
        made = []

        def optimizer(named: list) -> torch.optim.Optimizer:
            made.append([name for name, _ in named])
            return sgd(named)

        data = pairs((4, 4), (4, 4), (4, 4))
        model = copy_of(layers)
        train_delayed(model, nn.functional.mse_loss, sgd_of_trainable, data, 2)
        with make(layers, optimizer=optimizer, schedule="2bw", pp=3) as pipeline:
            for pair in data:
                pipeline.train_step(*pair)
            state = pipeline.full_state_dict()
        assert len(made) == 2
        for name, tensor in model.state_dict().items():
            assert torch.equal(state[name], tensor), name

    def test_callables_start_from_the_same_weights_for_any_split(self) -> None:
        torch.manual_seed(11)
        before = torch.random.get_rng_state()
        layers = [lambda: nn.Linear(4, 4), lambda: nn.LayerNorm(4), lambda: nn.Linear(4, 1)]
        states = []
        for pp in (1, 2, 3):
            with make(layers, pp=pp, seed=5) as pipeline:
                states.append(pipeline.full_state_dict())
        for state in states[1:]:
            assert all(torch.equal(state[name], states[0][name]) for name in states[0])
        assert not torch.equal(states[0]["0.weight"][:1], states[0]["2.weight"])
        assert torch.equal(torch.random.get_rng_state(), before)

    def test_callables_are_balanced_by_parameters(self) -> None:
        layers = [lambda: nn.Linear(64, 64), *[lambda: nn.Linear(8, 8)] * 3, nn.Tanh]
        assert make(layers).split == [1, 4]

    @pytest.mark.parametrize("pp", [1, 2])
    def test_the_users_random_stream_goes_on_undisturbed(self, pp: int) -> None:
        layers = [nn.Dropout(0.5), *linears(4, 3), nn.Dropout(0.5), *linears(3, 1)]
        torch.manual_seed(0)
        expected = torch.rand(3)
        torch.manual_seed(0)
        with make(layers, pp=pp) as pipeline:
            pipeline.train_step(*pairs((4, 4))[0])
            pipeline.drain()
        assert torch.equal(torch.rand(3), expected)

    def test_a_layer_may_begin_to_draw(self) -> None:
        """Then it, too, draws by (seed, batch, microbatch, layer), under the lock."""

        class Later(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.calls = 0

            def forward(self, x: Tensor) -> Tensor:
                self.calls += 1
                return nn.functional.dropout(x, 0.5) if self.calls > 4 else x

        layers = [Later(), *linears(8, 8), Later(), nn.Dropout(0.5), *linears(8, 1)]
        assert_trains_like(layers, pairs(*[(8, 8)] * 6), schedule="1f1b", split=[2, 3])

    def test_dropout_may_be_raised(self) -> None:
        states = []
        for pp in (1, 2):
            layers = [nn.Dropout(0.0), *linears(8, 8), nn.Dropout(0.0), *linears(8, 1)]
            with make(layers, pp=pp, split=None) as pipeline:
                pipeline.train_step(*pairs((8, 8))[0])
                pipeline.drain()
                layers[0].p = layers[2].p = 0.5
                for pair in pairs((8, 8), (8, 8)):
                    pipeline.train_step(*pair)
                states.append(pipeline.full_state_dict())
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])

    def test_masks_differ_between_microbatches_batches_and_layers(self) -> None:
        class Keeps(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.seen: list[Tensor] = []

            def forward(self, x: Tensor) -> Tensor:
                mask = nn.functional.dropout(torch.ones(64))
                self.seen.append(mask)
                return x * mask.mean()

        layers = [Keeps(), *linears(4, 1), Keeps()]
        with make(layers, num_microbatches=2) as pipeline:
            for pair in pairs((4, 4), (4, 4)):
                pipeline.train_step(*pair)
            pipeline.drain()
        masks = {tuple(mask.tolist()) for layer in (layers[0], layers[2]) for mask in layer.seen}
        assert len(masks) == 8

    def test_dropout_that_torchs_checkpoint_runs_again(self) -> None:
        """Its backward sets the generator that all threads share."""

        class Checkpointed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(64, 64)

            def forward(self, x: Tensor) -> Tensor:
                def run(x: Tensor) -> Tensor:
                    return nn.functional.dropout(self.linear(x), 0.5).tanh()

                return checkpoint(run, x, use_reentrant=False)

        torch.manual_seed(0)
        layers = [Checkpointed() for _ in range(4)]
        data = [(torch.randn(64, 64), torch.randn(64, 64)) for _ in range(8)]
        assert_trains_like(layers, data, schedule="gpipe", pp=4, split=None)

    def test_a_loss_that_draws_does_not_depend_on_the_split(self) -> None:
        def noisy(output: Tensor, target: Tensor) -> Tensor:
            return nn.functional.mse_loss(nn.functional.dropout(output, 0.5), target)

        data, losses = pairs((8, 4), (8, 4)), []
        for pp in (1, 2, 3):
            with make([*linears(4, 3), nn.Dropout(0.1), *linears(3, 1)], noisy, pp=pp) as pipeline:
                results = [pipeline.train_step(*pair) for pair in data]
                losses.append([float(result.loss) for result in results])
        assert losses[1:] == losses[:1] * 2

    def test_nothing_runs_before_the_first_batch(self) -> None:
        class Counts(nn.Module):
            calls = 0

            def forward(self, x: Tensor) -> Tensor:
                Counts.calls += 1
                assert x.isfinite().all()
                return x

        with make([*linears(4, 3), Counts(), *linears(3, 1)]) as pipeline:
            assert Counts.calls == 0
            pipeline.train_step(*pairs((4, 4))[0])
            pipeline.drain()
        assert Counts.calls == 2


def train(pipeline: twobw.Pipeline, num_batches: int) -> None:
    for _ in range(num_batches):
        pipeline.train_step(torch.ones(4, 1), torch.ones(4, 1))


def sgd_of_trainable(named: list) -> torch.optim.Optimizer:
    return sgd([(name, p) for name, p in named if p.requires_grad])


class TestResults:
    @pytest.mark.parametrize("schedule", EVERY_SCHEDULE)
    def test_the_loss_can_be_read_at_once_later_or_never(self, schedule: str) -> None:
        data = pairs(*[(4, 4)] * 6)
        with make(linears(4, 3, 1), schedule=schedule) as pipeline:
            first = pipeline.train_step(*data[0])
            value = float(first.loss)
            results = [pipeline.train_step(*pair) for pair in data[1:]]
            assert float(first.loss) == value
            assert [r.batch for r in results] == [1, 2, 3, 4, 5]
            assert all(torch.tensor(float(r.loss)).isfinite() for r in results[::2])

    def test_stage_metrics(self) -> None:
        with make(linears(4, 3, 1), schedule="2bw") as pipeline:
            metrics = pipeline.train_step(*pairs((4, 4))[0]).stage_metrics()
        assert [stage.num_versions for stage in metrics] == [2, 2]
        assert all(0 <= stage.busy_fraction <= 1 for stage in metrics)
        assert all(stage.peak_bytes > 1e6 for stage in metrics)

    def test_a_stop_that_was_asked_for_ends_with_the_next_batch(self) -> None:
        data = pairs((4, 4), (4, 4))
        with make(linears(4, 3, 1)) as pipeline:
            assert not pipeline.train_step(*data[0]).is_last
            pipeline.request_stop()
            assert pipeline.train_step(*data[1]).is_last

    def test_evaluation_is_in_eval_mode_and_leaves_training_as_it_was(self) -> None:
        layers = [nn.Sequential(*linears(4, 3), nn.Dropout(0.5)), nn.BatchNorm1d(3), *linears(3, 1)]
        layers[1].eval()  # a mode that must come back
        data = pairs((4, 4), (4, 4), (4, 4))
        with make(layers, schedule="2bw", num_microbatches=2) as pipeline:
            for pair in data[:2]:
                pipeline.train_step(*pair)
            model = nn.Sequential(*layers)
            state = pipeline.full_state_dict()
            loss = pipeline.evaluate(*data[2], num_microbatches=4)
            assert [layer.training for layer in model] == [True, False, True]
            after = pipeline.full_state_dict()
        fresh = copy_of(layers)
        fresh.load_state_dict(state)
        fresh.eval()
        expected = nn.functional.mse_loss(fresh(data[2][0]), data[2][1]).item()
        assert loss == pytest.approx(expected, rel=1e-6)
        assert all(torch.equal(state[name], after[name]) for name in state)

    def test_rate_k_is_applied_to_batch_k(self) -> None:
        """Each batch moves the bias by its rate: the gradient is 1 always."""

        class Bias(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.bias = nn.Parameter(torch.zeros(()))

            def forward(self, x: Tensor) -> Tensor:
                return x + self.bias

        seen = []
        rates = [1.0, 0.5, 0.25, 0.125]
        with make(
            [Bias(), Bias()],
            lambda output, target: output.mean(),
            optimizer=lambda named: torch.optim.SGD(named, lr=1.0),
            lr_scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda k: rates[k]),
            schedule="2bw",
        ) as pipeline:
            for _ in range(3):
                pipeline.train_step(*pairs((4, 1))[0])
                seen.append(pipeline.full_state_dict())
        for k, state in enumerate(seen):
            assert state["0.bias"].item() == state["1.bias"].item() == -sum(rates[: k + 1])

    def test_the_timeline_shows_every_op_of_the_last_batches(self) -> None:
        with make(linears(4, 3, 1), schedule="2bw") as pipeline:
            for pair in pairs(*[(4, 4)] * 3):
                pipeline.train_step(*pair)
            pipeline.evaluate(*pairs((4, 4))[0])
            timeline = pipeline.timeline()
        assert timeline.source == "measured"
        ops = [str(s.op) for s in timeline.spans_of(1) if s.op.kind.is_compute]
        grid = "F0@0 B0@0 F1@0 B1@0 U1@1 F2@0 B2@0 F3@0 B3@0 U3@2 F4@1 B4@1 F5@1 B5@1 U5@3"
        assert ops == grid.split()


class TestRefusals:
    def test_fewer_samples_than_microbatches(self) -> None:
        with (
            make(linears(4, 3, 1), num_microbatches=4) as pipeline,
            pytest.raises(
                ValueError, match="inputs have 3 samples, fewer than num_microbatches = 4"
            ),
        ):
            pipeline.train_step(*pairs((3, 4))[0])

    def test_inputs_and_targets_of_different_sizes(self) -> None:
        with (
            make(linears(4, 3, 1)) as pipeline,
            pytest.raises(ValueError, match="different numbers of samples"),
        ):
            pipeline.train_step(torch.ones(4, 4), torch.ones(5, 1))

    def test_missing_targets(self) -> None:
        with (
            make(linears(4, 3, 1)) as pipeline,
            pytest.raises(ValueError, match="targets is None"),
        ):
            pipeline.train_step(torch.ones(4, 4), None)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"split": [1, 1]}, r"split = \[1, 1\] does not fit"),
            ({"split": [3, 0]}, r"split = \[3, 0\] does not fit"),
            ({"pp": 4}, "4 stages need at least as many layers; there are 3"),
            ({"pp": 0}, "pp = 0"),
            ({"pp": None}, "pp is None"),
            ({"dp": 0}, "dp = 0"),
            ({"num_microbatches": 0}, "num_microbatches is 0"),
            ({"schedule": "2bv"}, "did you mean '2bw'"),
            ({"precision": "fp8"}, "precision = 'fp8' is not one of fp32, bf16, fp16"),
            ({"recompute": "all"}, "recompute = 'all' is not one of none, layer, stage, attention"),
            (
                {"precision": "fp16", "schedule": "weight-stashing"},
                "'fp16' does not go with schedule = 'weight-stashing'",
            ),
            ({"schedule": "gpipe", "extra_in_flight": 1}, "does not know the option"),
        ],
    )
    def test_settings(self, options: dict, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            make(linears(4, 3, 2, 1), **options)

    def test_a_scheduler_that_needs_a_metric(self) -> None:
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
        with pytest.raises(ValueError, match="ReduceLROnPlateau, which needs a metric"):
            make(linears(4, 3, 1), lr_scheduler=plateau)

    def test_statistics_that_stages_share(self) -> None:
        def layers() -> list[nn.Module]:
            norm = nn.BatchNorm1d(4)
            return [*linears(4, 4), norm, *linears(4, 4), norm, *linears(4, 1)]

        with (
            make(layers(), split=[3, 2]) as pipeline,
            pytest.raises(ValueError, match=r"buffer .*running_mean, which layers on several"),
        ):
            train_on(pipeline, pairs((4, 4), (4, 4)))
        late = layers()
        late[1].eval()  # its statistics begin to change later
        with make(late, split=[3, 2]) as pipeline:
            train_on(pipeline, pairs((4, 4)))
            late[1].train()
            pipeline.train_step(*pairs((4, 4))[0])
            with pytest.raises(ValueError, match=r"running_mean, which layers on several"):
                pipeline.drain()
        with make(layers(), split=[1, 4]) as pipeline:  # both places on one stage
            pipeline.train_step(*pairs((4, 4))[0])
            assert pipeline.full_state_dict()["1.num_batches_tracked"] == 4

    def test_tables_that_stages_share(self) -> None:
        """They may hold anything, as long as it stays."""
        first, second = linears(4, 4, 4)
        first.register_buffer("table", torch.tensor([1.0, math.nan, -0.0]))
        second.register_buffer("table", first.table)
        with make([first, second, *linears(4, 1)], split=[1, 2]) as pipeline:
            train_on(pipeline, pairs((4, 4), (4, 4)))

    def test_an_illegal_schedule_is_shown_with_its_fault(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        two_bw = SCHEDULES["2bw"]
        monkeypatch.setitem(
            SCHEDULES, "2bw", lambda *sizes: replace(two_bw(*sizes), num_versions=1)
        )
        with pytest.raises(ValueError, match=r"'2bw' with 2 stages and 2 microbatches is illegal"):
            make(linears(4, 3, 1), schedule="2bw")

    @pytest.mark.parametrize(
        ("pp", "m", "message"),
        [(1, 4, "2bw with one stage"), (4, 2, "2/3 of full speed")],
    )
    def test_a_wasteful_2bw_warns(self, pp: int, m: int, message: str) -> None:
        with pytest.warns(UserWarning, match=message):
            make(linears(1, 1, 1, 1, 1), schedule="2bw", pp=pp, num_microbatches=m)

    @pytest.mark.parametrize("split", [None, [1, 1]])
    @pytest.mark.parametrize("wrong", [3, lambda: 3])
    def test_layers_that_are_none(self, wrong: object, split: list[int] | None) -> None:
        with pytest.raises(TypeError, match=r"layers\[1\] is or gives a int"):
            make([nn.Linear(1, 1), wrong], split=split)

    def test_a_layer_that_the_meta_device_cannot_build(self) -> None:
        def build() -> nn.Module:
            return nn.Linear(1, int(torch.ones(1).item()))

        with pytest.raises(RuntimeError) as caught:
            make([nn.Linear(1, 1), build])
        assert "while layers[1] was built on the meta device" in caught.value.__notes__[0]
        assert make([nn.Linear(1, 1), build], split=[1, 1]).split == [1, 1]

    def test_an_optimizer_over_other_parameters(self) -> None:
        layers = linears(4, 3, 1)
        model = nn.Sequential(*layers)
        with pytest.raises(ValueError, match="SGD holds parameters that are not among those given"):
            make(layers, optimizer=lambda named: torch.optim.SGD(model.parameters(), lr=0.1))

    @pytest.mark.parametrize("inputs", [[torch.ones(4, 4)], {"x": torch.ones(4, 4)}, (1, 2)])
    def test_inputs_that_are_no_tensors(self, inputs: object) -> None:
        kind = type(inputs).__name__
        with (
            make(linears(4, 3, 1)) as pipeline,
            pytest.raises(TypeError, match=f"inputs are a {kind}; they must be a tensor or a"),
        ):
            pipeline.train_step(inputs, torch.ones(4, 1))

    def test_autocast(self) -> None:
        with (
            make(linears(4, 3, 1)) as pipeline,
            torch.autocast("cpu", torch.bfloat16),
            pytest.raises(ValueError, match=r"torch.autocast is on.*precision = 'bf16'"),
        ):
            pipeline.train_step(*pairs((4, 4))[0])

    def test_a_layer_that_gives_no_tensor(self) -> None:
        class Gives(nn.Module):
            def forward(self, x: Tensor) -> dict:
                return {"x": x}

        with make([Gives(), nn.Linear(1, 1)]) as pipeline:
            with pytest.raises(TypeError, match=r"layer 0 \(Gives\) gave a dict"):
                pipeline.train_step(torch.ones(2, 1), torch.ones(2, 1))
            with pytest.raises(RuntimeError, match="this pipeline has failed"):
                pipeline.drain()

    def test_a_loss_that_is_no_scalar(self) -> None:
        with (
            make(linears(1, 1, 1), lambda output, target: output) as pipeline,
            pytest.raises(ValueError, match=r"loss_fn gave \[2, 1\]"),
        ):
            train(pipeline, 3)

    def test_an_error_on_any_stage_says_where_and_ends_the_threads(self) -> None:
        class Fails(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                raise ZeroDivisionError("on purpose")

        layers = [*linears(1, 1, 1), Fails()]
        with make(layers, pp=3) as pipeline:
            with pytest.raises(ZeroDivisionError, match="on purpose") as caught:
                train(pipeline, 3)
            layer, op = caught.value.__notes__
            assert layer.startswith("in layer 2 (Fails), which was given float32[2, 1] by layer 1")
            assert "on stage 2, in FORWARD of microbatch 0" in op
            assert "last op that ended here: RA0@0" in op
        for thread in threading.enumerate():
            if thread.name.startswith("stage-"):
                thread.join(timeout=10)
                assert not thread.is_alive()
