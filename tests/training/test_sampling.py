"""Sampling: the bytes follow the model's odds, and a run that cannot be sampled says why."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from twobw.config import load_config, write_resolved_config
from twobw.models.sizes import GPT_SIZES
from twobw.models.whole import whole_model
from twobw.training.run_folder import CONFIG, WEIGHTS
from twobw.training.sampling import RunError, generate, load_run, sample_run


class NextLetter(nn.Module):
    """Gives the byte after the last one odds of ``e**strength``, and notes what it was shown."""

    def __init__(self, strength: float = 50.0, vocab_size: int = 256) -> None:
        super().__init__()
        self.strength, self.vocab_size = strength, vocab_size
        self.seen: list[bytes] = []

    def forward(self, tokens: Tensor) -> Tensor:
        assert not self.training
        self.seen.append(bytes(tokens[0].tolist()))
        following = (tokens + 1) % 256
        return self.strength * nn.functional.one_hot(following, self.vocab_size).float()


def write_run(folder: Path, name: str = "first", model: str = "gpt-tiny") -> Path:
    run = folder / name
    run.mkdir(parents=True)
    source = folder / f"{name}.toml"
    source.write_text(
        f"[model]\nname = '{model}'\n[optimizer]\nlr = 1\n"
        "[training]\nnum_batches = 1\nglobal_batch_size = 4\n"
    )
    write_resolved_config(load_config(source), run / CONFIG)
    return run


@pytest.mark.parametrize("temperature", [0, 5e-324, 1.0])
def test_the_likeliest_byte_is_written(temperature: float) -> None:
    written = generate(NextLetter(), b"ab", 5, sequence_length=8, temperature=temperature)
    assert written == b"cdefg"


def test_the_model_sees_the_last_bytes_it_can() -> None:
    model = NextLetter()
    generate(model, b"0123a", 3, sequence_length=4)
    assert model.seen == [b"123a", b"23ab", b"3abc"]


def test_a_run_of_a_bert_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path, model="bert-tiny")
    with pytest.raises(RunError, match="first is a run of a BERT, which writes no text"):
        sample_run(run, b"")


def test_an_empty_prompt_starts_a_line() -> None:
    model = NextLetter()
    assert generate(model, b"", 1, sequence_length=4) == b"\x0b"
    assert model.seen == [b"\n"]


def test_the_draws_follow_the_odds_and_the_temperature() -> None:
    # Odds of the next letter against each of the 255 others: e**5.54 = 255, so half.
    for temperature, share in [(1.0, 0.5), (2.0, 16 / 271)]:
        letters = generate(
            NextLetter(5.541), b"a", 2000, sequence_length=1, temperature=temperature
        )
        pairs = zip(b"a" + letters, letters, strict=False)
        right = sum((one + 1) % 256 == other for one, other in pairs)
        assert right / 2000 == pytest.approx(share, abs=0.04)


def test_top_k_leaves_the_rest_out() -> None:
    assert generate(NextLetter(0.1), b"a", 50, sequence_length=1, top_k=1) == bytes(range(98, 148))
    few = generate(NextLetter(0.1), b"a", 50, sequence_length=1, top_k=1000)
    assert len(set(few)) > 25  # more than there are: all


def test_a_seed_writes_the_same_again_and_another_does_not() -> None:
    one, again, other = (
        generate(NextLetter(1.0), b"a", 40, sequence_length=4, seed=seed) for seed in (5, 5, 6)
    )
    assert one == again != other


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    generate(NextLetter(1.0), b"a", 5, sequence_length=4)
    assert torch.equal(before, torch.get_rng_state())


def test_tokens_that_are_no_byte_are_never_written() -> None:
    model = NextLetter(-1000.0, vocab_size=300)  # every token but one is as likely
    assert len(generate(model, b"a", 200, sequence_length=4)) == 200


def test_no_tokens_wanted_none_written() -> None:
    assert generate(NextLetter(), b"a", 0, sequence_length=4) == b""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_tokens", -1),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", 0),
        ("seed", -1),
        ("seed", 2**63),
    ],
)
def test_a_number_out_of_its_range_is_refused(name: str, value: float) -> None:
    arguments = {"num_tokens": 1, "sequence_length": 4} | {name: value}
    with pytest.raises(ValueError, match=f"{name} is {value}; it must be"):
        generate(NextLetter(), b"a", **arguments)  # type: ignore[arg-type]


def test_a_model_that_diverged_is_refused() -> None:
    with pytest.raises(ValueError, match="diverged"):
        generate(NextLetter(float("nan")), b"a", 1, sequence_length=4)


def test_a_run_writes_what_its_weights_say(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    torch.manual_seed(1)
    model = whole_model(GPT_SIZES["gpt-tiny"])
    save_file(model.state_dict(), run / WEIGHTS)
    loaded, sequence_length = load_run(run)
    assert sequence_length == 32
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    wanted = generate(model, b"def ", 60, sequence_length=32, seed=2)
    assert sample_run(run, b"def ", 60, seed=2) == wanted


def test_a_folder_that_is_no_run_is_refused_with_the_nearest(tmp_path: Path) -> None:
    run = write_run(tmp_path, "demo-run")
    with pytest.raises(RunError, match=f"is not a run.*did you mean {run}"):
        load_run(tmp_path / "demo-rum")
    with pytest.raises(RunError, match="the runs beside it are demo-run"):
        load_run(tmp_path / "x")
    with pytest.raises(RunError, match=r"no config\.toml$"):
        load_run(tmp_path / "no" / "x")


def test_a_run_without_weights_yet_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no weights\.safetensors yet"):
        load_run(write_run(tmp_path))


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    (run / WEIGHTS).write_bytes(b"damaged")
    with pytest.raises(RunError, match="cannot be read"):
        load_run(run)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    save_file(nn.Linear(2, 2).state_dict(), run / WEIGHTS)
    with pytest.raises(RunError, match="does not fit the model"):
        load_run(run)
