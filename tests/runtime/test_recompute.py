"""Running layers again for their backward, beside the plain references."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch import Tensor, nn

from tests.runtime.reference import run_model, train
from tests.runtime.test_features import DELAY, SEED, adamw, assert_equal, build, build_data, run
from twobw.runtime.messages import copies_of
from twobw.runtime.recompute import BufferKeeper, recompute_attention


def train_plainly(model: nn.Sequential, data) -> list[float]:
    """Two microbatches a batch, no delay; the model itself, as layers that stand twice need."""
    optimizer, losses = adamw(list(model.named_parameters())), []
    for k, (inputs, targets) in enumerate(data):
        total = 0.0
        pieces = zip(inputs.tensor_split(2), targets.tensor_split(2), strict=True)
        for microbatch, (x, y) in enumerate(pieces):
            output = run_model(model, x, seed=SEED, batch=k, microbatch=microbatch)
            loss = nn.functional.mse_loss(output, y) * (len(x) / len(inputs))
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


class TestRecompute:
    @pytest.mark.parametrize("recompute", ["layer", "stage", "attention"])
    @pytest.mark.parametrize(("schedule", "pp"), [("2bw", 3), ("1f1b", 2), ("gpipe", 3)])
    def test_changes_nothing(self, recompute: str, schedule: str, pp: int) -> None:
        model = build()
        state, losses, _ = run(model, build_data(), schedule, pp=pp, recompute=recompute)
        expected = train(model, nn.MSELoss(), adamw, build_data(), 2, SEED, delay=DELAY[schedule])
        assert_equal(state, model.state_dict())
        assert losses == expected

    @pytest.mark.parametrize("recompute", ["layer", "stage"])
    def test_several_outputs(self, recompute: str) -> None:
        class Fork(nn.Module):
            def forward(self, x: Tensor):
                return x * 2, (x > 0), x.detach(), None

        class Join(nn.Module):
            def forward(self, parts):
                return parts[0] * parts[1] + parts[2]

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 4), Fork(), Join(), nn.Linear(4, 1))
        state, losses, _ = run(model, build_data(), split=[2, 2], recompute=recompute)
        expected = train(model, nn.MSELoss(), adamw, build_data(), 2, SEED, delay=1)
        assert_equal(state, model.state_dict())
        assert losses == expected

    def test_attention_is_run_again_with_the_same_dropout(self) -> None:
        class Block(nn.Module):
            calls = 0

            def __init__(self) -> None:
                super().__init__()
                self.attention = nn.MultiheadAttention(6, 2, dropout=0.3, batch_first=True)
                self.attention.register_forward_pre_hook(lambda *_: None)

            def forward(self, x: Tensor) -> Tensor:
                rows = x[:, None]
                return x + self.attention(rows, rows, rows, need_weights=False)[0][:, 0]

        torch.manual_seed(0)
        model = nn.Sequential(Block(), Block(), nn.Linear(6, 1))
        state, losses, _ = run(model, build_data(), recompute="attention")
        expected = train(model, nn.MSELoss(), adamw, build_data(), 2, SEED, delay=1)
        assert_equal(state, model.state_dict())
        assert losses == expected

    @pytest.mark.parametrize("recompute", ["none", "layer", "stage", "attention"])
    @pytest.mark.parametrize("pp", [1, 2])
    def test_attention_with_statistics_that_works_in_place(self, pp: int, recompute: str) -> None:
        """What it does to its input its caller sees; what it does to its buffers is done once."""

        class Attention(nn.Module):
            is_attention = True

            def __init__(self) -> None:
                super().__init__()
                self.norm = nn.BatchNorm1d(6)
                self.register_buffer("calls", torch.zeros(()))

            def forward(self, x: Tensor, *, again: Tensor) -> Tensor:
                assert again is x
                self.calls += 1
                x.mul_(self.calls.sqrt())
                return self.norm(x.exp() * again)

        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear, self.attention = nn.Linear(6, 6), Attention()

            def forward(self, x: Tensor) -> Tensor:
                x = self.linear(x)
                return self.attention(x, again=x) + x

        torch.manual_seed(0)
        model = nn.Sequential(Block(), Block(), nn.Linear(6, 1))
        state, losses, _ = run(model, build_data(), "1f1b", pp=pp, recompute=recompute)
        expected = train(model, nn.MSELoss(), adamw, build_data(), 2, SEED, delay=0)
        assert_equal(state, model.state_dict())
        assert losses == expected
        assert state["0.attention.calls"] == state["0.attention.norm.num_batches_tracked"] == 10

    @pytest.mark.parametrize("recompute", ["layer", "stage"])
    def test_layers_that_work_in_place_at_times(self, recompute: str) -> None:
        class AtTimes(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x.mul_(2) if x.sum() > 0 else x)

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), AtTimes(6, 6), nn.Flatten(), AtTimes(6, 1))
        for split in ([1, 3], [2, 2]):
            state, losses, _ = run(model, build_data(), "1f1b", split=split, recompute=recompute)
            expected = copy.deepcopy(model)
            assert train(expected, nn.MSELoss(), adamw, build_data(), 2, SEED, delay=0) == losses
            assert_equal(state, expected.state_dict())

    @pytest.mark.parametrize("recompute", ["layer", "stage", "attention"])
    def test_inputs_that_are_views_of_one_tensor(self, recompute: str) -> None:
        """Of strides of their own, and overlapping, one of them changed in place."""

        class Attention(nn.Module):
            is_attention = True

            def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return (q.mul_(0.5) @ k.T).softmax(-1) @ v

        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear, self.attention = nn.Linear(6, 99), Attention()

            def forward(self, x: Tensor) -> Tensor:
                h = self.linear(x) * 1.0
                return self.attention(h[:, :33], h[:, 20:53], h[:, 66:])

        torch.manual_seed(0)
        model = nn.Sequential(Block(), nn.Linear(33, 6), Block(), nn.Linear(33, 1))
        state, losses, _ = run(model, build_data(), "1f1b", recompute=recompute)
        assert train(model, nn.MSELoss(), adamw, build_data(), 2, SEED, delay=0) == losses
        assert_equal(state, model.state_dict())

    @pytest.mark.parametrize("recompute", ["layer", "stage", "attention"])
    def test_buffers_of_many_kinds(self, recompute: str) -> None:
        """One that a layer has twice, one of a layer that is there twice, one that is set later."""

        class Mean(nn.Module):
            is_attention = True

            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("mean", None)
                self.register_buffer("calls", torch.zeros(6))
                self.inner = nn.Module()
                self.inner.register_buffer("calls", self.calls)

            def forward(self, x: Tensor) -> Tensor:
                self.calls += x.detach().mean(0)
                now = x.detach().mean()
                self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now
                return x * self.inner.calls.cos() - self.mean

        torch.manual_seed(0)
        mean = Mean()
        model = nn.Sequential(nn.Linear(6, 6), mean, nn.Linear(6, 6), mean, nn.Linear(6, 1))
        expected = copy.deepcopy(model)
        state, losses, _ = run(model, build_data(), "1f1b", pp=1, recompute=recompute)
        assert train_plainly(expected, build_data()) == pytest.approx(losses)
        for name, parameter in expected.named_parameters():
            torch.testing.assert_close(state[name], parameter)

    def test_a_large_table_is_copied_once(self) -> None:
        layer = nn.Module()
        layer.register_buffer("table", torch.arange(50_000.0))
        layer.register_buffer("count", torch.zeros(()))
        keeper = BufferKeeper([layer])
        (_, _, table), (_, _, count) = keeper.keep()._kept
        (_, _, later_table), (_, _, later_count) = keeper.keep()._kept
        assert later_table is table
        assert later_count is not count
        layer.table[3] = 7.0
        (_, _, changed), _ = keeper.keep()._kept
        assert (table[3], changed[3]) == (3.0, 7.0)

    def test_what_attention_is_given_is_not_copied_for_long(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        copies: list[weakref.ref] = []

        def watched(tensors: list[Tensor]) -> list[Tensor]:
            made = copies_of(tensors)
            copies.extend(map(weakref.ref, made))
            return made

        class Attention(nn.Module):
            is_attention = True

            def forward(self, x: Tensor, mask: Tensor) -> Tensor:
                return (x @ x.T + mask) @ x

        monkeypatch.setattr("twobw.runtime.recompute.copies_of", watched)
        attention, mask = Attention(), torch.zeros(4, 4)
        recompute_attention([attention])
        output = attention(torch.ones(4, 6, requires_grad=True) * 1.0, mask)
        assert len(copies) == 2
        assert all(copy() is None for copy in copies)
        output.sum().backward()

    @pytest.mark.parametrize(("recompute", "split"), [("layer", [2]), ("none", [1, 1])])
    def test_a_change_in_place_of_shared_memory_is_refused(
        self, recompute: str, split: list[int]
    ) -> None:
        class Twice(nn.Linear):
            def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
                h = super().forward(x)
                return h, h[:, :1]

        class Changes(nn.Module):
            def forward(self, parts: tuple[Tensor, Tensor]) -> Tensor:
                return parts[0].mul_(2).sum(1, keepdim=True) + parts[1]

        model = nn.Sequential(Twice(6, 6), Changes())
        with pytest.raises(RuntimeError, match=r"layer 1 .*shares memory with another"):
            run(model, build_data(), "1f1b", pp=len(split), split=split, recompute=recompute)

    @pytest.mark.parametrize(("recompute", "calls"), [("none", 1), ("layer", 2), ("stage", 2)])
    def test_layers_are_run_as_often_as_said(self, recompute: str, calls: int) -> None:
        class Counts(nn.Linear):
            calls = 0

            def forward(self, x: Tensor) -> Tensor:
                Counts.calls += 1
                return super().forward(x)

        model = nn.Sequential(Counts(6, 6), nn.Linear(6, 1))
        run(model, build_data(num_batches=3), recompute=recompute)
        assert Counts.calls == 3 * 2 * calls
