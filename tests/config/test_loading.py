"""The config: what a run gets, and what is refused with which words."""

import math
import tomllib
from pathlib import Path

import pytest

from tests.config.files import problem_of, problems_of, toml, write
from twobw.config import (
    SETTINGS,
    Config,
    ConfigError,
    load_config,
    read_resolved_config,
    write_resolved_config,
)
from twobw.core.generators import SCHEDULES
from twobw.models.sizes import GPT_SIZES, MODEL_SIZES, bert_config

CONFIGS = sorted(Path(__file__).parents[2].glob("configs/*.toml"))


def value_of(config: Config, setting: str) -> object:
    section, key = setting.split(".")
    return getattr(getattr(config, section), key)


def test_a_short_config_gets_the_defaults(tmp_path: Path) -> None:
    config = load_config(write(tmp_path))
    assert config.parallel.schedule == "2bw-fresh"
    assert (config.parallel.pp, config.parallel.num_microbatches) == (2, 4)
    assert config.model.size() == GPT_SIZES["gpt-tiny"]
    assert config.data.paths == ()
    assert config.run_folder == Path("runs/first")  # named after the file


def test_a_model_value_overrides_that_of_its_named_size(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, model={"num_layers": 7, "dropout": 0.5}))
    assert config.model.size().num_layers == 7
    assert config.model.size().dropout == 0.5
    assert config.model.size().width == GPT_SIZES["gpt-tiny"].width


@pytest.mark.parametrize(
    ("setting", "text", "value"),
    [
        ("training.seed", "3", 3),
        ("training.timeout_s", "3", 3.0),
        ("optimizer.lr", "1e-3", 0.001),
        ("optimizer.betas", "[0.8, 0.9]", (0.8, 0.9)),
        ("optimizer.betas", "0.8, 0.9", (0.8, 0.9)),
        ("optimizer.decay", "linear", "linear"),
        ("optimizer.decay", '"linear"', "linear"),
        ("parallel.schedule", "1f1b", "1f1b"),
        ("parallel.split", "1,3", (1, 3)),
        ("run.name", "2024", "2024"),
        ("run.name", "true", "true"),
        ("run.name", "1.50", "1.50"),
        ("run.folder", "a b = c # d", "a b = c # d"),
        ("run.folder", "a\nseed = 3", "a\nseed = 3"),
    ],
)
def test_an_override_is_toml_or_a_plain_string(
    tmp_path: Path, setting: str, text: str, value: object
) -> None:
    config = load_config(write(tmp_path, training={"seed": 9}), {setting: text})
    assert value_of(config, setting) == value


def test_every_setting_can_be_overridden_by_what_it_has(tmp_path: Path) -> None:
    path = write(tmp_path)
    config = load_config(path)
    for setting in SETTINGS:
        value = value_of(config, setting)
        text = toml(list(value) if isinstance(value, tuple) else value)
        assert load_config(path, {setting: text}) == config


def test_an_override_may_make_a_section_that_the_file_lacks(tmp_path: Path) -> None:
    assert load_config(write(tmp_path), {"parallel.pp": "3"}).parallel.pp == 3


def test_paths_may_be_one_string_and_must_exist(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("x")
    path = write(tmp_path, data={"paths": str(text)})
    assert load_config(path).data.paths == (str(text),)
    assert load_config(path, {"data.paths": str(tmp_path)}).data.paths == (str(tmp_path),)
    problem = problem_of(path, {"data.paths": f"{tmp_path}/txt.txt"})
    assert "data.paths[0]" in problem
    assert f"did you mean {text}?" in problem


@pytest.mark.parametrize(
    ("section", "key", "value", "said"),
    [
        ("model", "name", "gpt-tny", "did you mean gpt-tiny?"),
        ("model", "num_layers", 0, "must be at least 1"),
        ("model", "num_layers", -3, "must be at least 1"),
        ("model", "width", 33, "num_heads is 2, which does not divide width 33"),
        ("model", "vocab_size", 255, "must be at least 256"),
        ("model", "dropout", 1.0, "must be less than 1"),
        ("model", "tied", "yes", "must be true or false"),
        ("data", "validation_fraction", 0.0, "must be greater than 0"),
        ("data", "validation_fraction", 1.0, "must be less than 1"),
        ("data", "paths", [""], "at least 1 character"),
        ("data", "paths", 3, "must be a list"),
        ("parallel", "pp", 5, "4 (embedding, 2 blocks, head)"),
        ("parallel", "pp", 2.0, "must be a valid integer"),
        ("parallel", "pp", True, "must be a valid integer"),
        ("parallel", "dp", 0, "must be at least 1"),
        ("parallel", "shard_optimizer", 1, "must be true or false"),
        ("parallel", "check_replicas_every", -1, "must be at least 0"),
        ("parallel", "schedule", "2BW", "did you mean 2bw?"),
        ("parallel", "schedule", "wieght-stashing", "did you mean weight-stashing?"),
        ("parallel", "num_microbatches", 9, "global_batch_size = 8"),
        ("parallel", "split", [4], "must have parallel.pp = 2 entries"),
        ("parallel", "split", [2, 3], "adds up to 5"),
        ("parallel", "split", [0, 4], "must be at least 1"),
        ("parallel", "split", ["2", 2], "must be a valid integer"),
        ("parallel", "split", "half", "must be a list"),
        ("parallel", "extra_in_flight", -1, "must be at least 0"),
        ("optimizer", "name", "adam", "did you mean adamw?"),
        ("optimizer", "name", "moun", "did you mean muon?"),
        ("optimizer", "matrix_lr", math.nan, "must be a finite number"),
        ("optimizer", "ns_steps", 0, "must be at least 1"),
        ("optimizer", "adjust_lr_fn", "match_rms", "did you mean match_rms_adamw?"),
        ("optimizer", "decay_fraction", 0.0, "must be greater than 0"),
        ("optimizer", "lr", 0, "must be greater than 0"),
        ("optimizer", "lr", math.nan, "must be a finite number"),
        ("optimizer", "lr", math.inf, "must be a finite number"),
        ("optimizer", "lr", "0.1", "must be a valid number"),
        ("optimizer", "betas", [0.9], "must have more items"),
        ("optimizer", "betas", [0.9, 0.9, 0.9], "must have at most 2 items"),
        ("optimizer", "betas", [0.9, 1.0], "must be less than 1"),
        ("optimizer", "warmup_batches", 6, "training.num_batches = 5"),
        ("optimizer", "decay", "cosin", "did you mean cosine?"),
        ("optimizer", "final_lr_fraction", 1.5, "must be less than or equal to 1"),
        ("training", "num_batches", 0, "must be at least 1"),
        ("training", "seed", -1, "must be at least 0"),
        ("training", "seed", 2**63, f"must be less than {2**63}"),
        ("training", "timeout_s", 0.0, "must be greater than 0"),
        ("training", "log_every", 0, "must be at least 1"),
        ("training", "precision", "fp61", "did you mean fp16?"),
        ("training", "recompute", "layers", "did you mean layer?"),
        ("training", "max_grad_norm", -1.0, "must be at least 0"),
        ("training", "max_grad_norm", math.inf, "must be a finite number"),
        ("training", "evaluate_every", 1.5, "must be a valid integer"),
        ("run", "name", "../x", "must be a folder name"),
        ("run", "name", "", "must be a folder name"),
        ("run", "name", 3, "must be a valid string"),
    ],
)
def test_a_wrong_value_is_refused(
    tmp_path: Path, section: str, key: str, value: object, said: str
) -> None:
    problem = problem_of(write(tmp_path, **{section: {key: value}}))
    assert said in problem
    assert key in problem


def test_extra_in_flight_is_for_the_schedules_that_have_it(tmp_path: Path) -> None:
    path = write(tmp_path, parallel={"extra_in_flight": 1})
    assert load_config(path).parallel.extra_in_flight == 1
    assert "does not know the option" in problem_of(path, {"parallel.schedule": "gpipe"})


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_is_allowed(tmp_path: Path, schedule: str) -> None:
    assert load_config(write(tmp_path), {"parallel.schedule": schedule})


@pytest.mark.parametrize("name", MODEL_SIZES)
def test_every_model_is_allowed(tmp_path: Path, name: str) -> None:
    assert load_config(write(tmp_path), {"model.name": name}).model.size() == MODEL_SIZES[name]


def test_a_bert_may_have_classes(tmp_path: Path) -> None:
    path = write(tmp_path, model={"name": "bert-tiny", "num_classes": 3, "dropout": 0.2})
    assert load_config(path).model.size() == bert_config("bert-tiny", num_classes=3, dropout=0.2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model.num_classes": "3"}, "num_classes is 3, but gpt-tiny is not a BERT; leave it out"),
        ({"model.name": "bert-tiny", "model.num_classes": "1"}, "num_classes is 1; it must be at"),
        ({"model.name": "bert-tiny", "model.vocab_size": "256"}, "a BERT's must be at least 257"),
        ({"model.name": "bert-bas"}, "did you mean bert-base?"),
        ({"data.samples_per_class": "4"}, "samples_per_class = 4: needs model.num_classes"),
        ({"data.classes": "order"}, 'classes = "order": needs model.num_classes = 3, not 0'),
        (
            {"model.name": "bert-tiny", "model.num_classes": "4", "data.classes": "order"},
            "needs model.num_classes = 3, not 4",
        ),
        (
            {
                "model.name": "bert-tiny",
                "model.num_classes": "3",
                "data.classes": "order",
                "data.samples_per_class": "9",
            },
            "samples_per_class = 9: does not go with data.classes",
        ),
    ],
)
def test_what_only_one_family_may_have(tmp_path: Path, changes: dict[str, str], said: str) -> None:
    assert said in problem_of(write(tmp_path), changes)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("training.sede", "did you mean training.seed?"),
        ("training.lr", "did you mean optimizer.lr?"),  # right key, wrong section
        ("seed", "did you mean training.seed?"),
        ("trainin.seed", "did you mean training.seed?"),
        ("paralel.x", "did you mean parallel?"),
        ("training", "is a section, not a setting"),
        ("training.seed.x", "is not a setting"),
        ("", "is not a setting"),
    ],
)
def test_an_unknown_override_names_the_nearest(tmp_path: Path, name: str, said: str) -> None:
    problem = problem_of(write(tmp_path), {name: "1"})
    assert said in problem
    assert f"--{name} " in problem


def test_an_unknown_key_of_the_file_names_the_nearest(tmp_path: Path) -> None:
    problems = problems_of(write(tmp_path, trainin={"x": 1}, model={"widht": 3}))
    assert len(problems) == 2
    assert "trainin is not a setting; did you mean training?" in problems[0]
    assert "model.widht is not a setting; did you mean model.width?" in problems[1]


def test_a_value_that_came_from_the_command_line_is_shown_as_such(tmp_path: Path) -> None:
    assert problem_of(write(tmp_path), {"training.seed": "x"}).startswith('--training.seed = "x"')


def test_a_missing_setting_is_named(tmp_path: Path) -> None:
    path = tmp_path / "empty.toml"
    path.write_text("")
    missing = {problem.split(" is missing")[0] for problem in problems_of(path)}
    assert missing == {
        "model.name",
        "optimizer.lr",
        "training.num_batches",
        "training.global_batch_size",
    }


@pytest.mark.parametrize("text", ["model = 3", "run = 'x'", "data = []", "training = 1979-05-27"])
def test_a_section_must_be_a_table(tmp_path: Path, text: str) -> None:
    path = tmp_path / "flat.toml"
    path.write_text(text)
    section = text.split(" ")[0]
    assert any(f"it must be a section, [{section}]" in problem for problem in problems_of(path))
    assert any("it must be" in problem for problem in problems_of(path, {"model.width": "3"}))


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        model={"name": "x", "widht": 1},
        parallel={"dp": 3},
        optimizer={"lr": -1},
        training={"global_batch_size": 1},
        data={"paths": [str(tmp_path / "no")]},
    )
    said = "\n".join(problems_of(path, {"training.sed": "1"}))
    for name in ("model.name", "widht", "lr", "global_batch_size", "paths", "training.sed"):
        assert name in said
    assert len(said.splitlines()) == 6


def test_the_message_holds_the_file_and_every_problem(tmp_path: Path) -> None:
    path = write(tmp_path, optimizer={"lr": -1}, training={"seed": -1})
    with pytest.raises(ConfigError, match=r"first\.toml: 2 problems\n  .*lr.*\n  .*seed"):
        load_config(path)


def test_invalid_toml_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("[model]\nname = \n")
    assert "not valid TOML" in problem_of(path)
    assert "line 2" in problem_of(path)


def test_what_is_not_a_text_file_is_refused(tmp_path: Path) -> None:
    assert "cannot be read" in problem_of(tmp_path)
    path = tmp_path / "binary.toml"
    path.write_bytes(b"ab\xff\x00")
    assert "byte 2 is not UTF-8" in problem_of(path)


def test_a_file_that_may_not_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Path) -> bytes:
        raise PermissionError(13, "Permission denied")  # as root, no real file gives it

    path = write(tmp_path)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert "cannot be read: Permission denied" in problem_of(path)


def test_a_missing_file_names_the_nearest(tmp_path: Path) -> None:
    write(tmp_path, "demo.toml")
    assert f"did you mean {tmp_path / 'demo.toml'}?" in problem_of(tmp_path / "demp.toml")
    assert problem_of(tmp_path / "no" / "demo.toml") == "no such file"


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    path = write(tmp_path)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert load_config(path).model.name == "gpt-tiny"


def test_the_resolved_config_reads_back_the_same(tmp_path: Path) -> None:
    text = tmp_path / 'a "b"\\ \x7f\té\U0001f600.txt'
    text.write_text("x")
    overrides = {"data.paths": str(text), "parallel.split": "1, 3", "optimizer.lr": "1e-12"}
    config = load_config(write(tmp_path), overrides)
    resolved = tmp_path / "resolved.toml"
    write_resolved_config(config, resolved)
    assert read_resolved_config(resolved) == config
    assert load_config(resolved) == config  # a user may run it again
    tree = tomllib.loads(resolved.read_text(encoding="utf-8"))
    names = {f"{section}.{key}" for section, keys in tree.items() for key in keys}
    assert names == set(SETTINGS)  # complete: later defaults cannot change an old run
    text.unlink()
    assert read_resolved_config(resolved) == config  # a run outlives its text


def test_a_damaged_resolved_config_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("[model]\nname = 'gpt-tiny'\n")
    with pytest.raises(ConfigError, match="lr is missing"):
        read_resolved_config(path)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_configs_that_come_with_the_repository_load(path: Path) -> None:
    start = {"model.init_from": ""}  # another run makes what one of them starts from
    assert load_config(path, start).run.name == path.stem


def test_the_demo_is_among_them() -> None:
    assert "demo" in [path.stem for path in CONFIGS]


def test_a_config_is_frozen(tmp_path: Path) -> None:
    config = load_config(write(tmp_path))
    with pytest.raises(ValueError, match="frozen"):
        config.training.seed = 3  # type: ignore[misc]
