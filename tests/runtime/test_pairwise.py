"""Every pair of features together, beside the plain reference."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from tests.runtime.reference import stale_first, train, train_stashed
from tests.runtime.test_features import DELAY, SEED, build, build_data, momentum, run
from twobw.runtime.layers import choose_split

FACTORS: dict[str, list[Any]] = {
    "schedule": [*DELAY, "2bw-fresh", "paci", "weight-stashing"],
    "layout": [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (3, 2)],
    "recompute": ["none", "layer", "stage", "attention"],
    "tied": [False, True],
    "max_grad_norm": [None, 0.3],
    "precision": ["fp32", "bf16", "fp16"],
    "shard_optimizer": [False, True],
    "overlap_reduce": [True, False],
    "m": [1, 2, 3],
    "lookahead": [0.0, 0.8],
    "flush_batches": [0, 2],
}
REFUSED = [
    {"schedule": "paci", "recompute": "layer"},
    {"schedule": "paci", "recompute": "stage"},
    {"schedule": "paci", "recompute": "attention"},
    {"schedule": "paci", "lookahead": 0.8},
    {"schedule": "weight-stashing", "lookahead": 0.8},
    {"schedule": "weight-stashing", "precision": "fp16"},
]
"""What the pipeline does not take; test_refused_pairs makes sure of it."""

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def pairwise(factors: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Cases in which every pair of values of two factors that may meet does so at least once: each
    is made of pairs not met yet, the first ones that fit together."""
    pairs = {
        frozenset([(a, i), (b, j)]): {a: factors[a][i], b: factors[b][j]}
        for a, b in itertools.combinations(factors, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }
    refused = {pair for pair, values in pairs.items() if values in REFUSED}
    missing = set(pairs) - refused
    cases = []
    while missing:
        chosen: dict[str, int] = {}
        for pair in sorted(missing, key=sorted):
            together = dict(pair) | chosen
            is_refused = any(rule <= together.items() for rule in refused)
            if together.items() >= pair and not is_refused:
                chosen = together
        case = {name: chosen.get(name, 0) for name in factors}
        missing -= {frozenset(pair) for pair in itertools.combinations(case.items(), 2)}
        cases.append({name: factors[name][index] for name, index in case.items()})
    return cases


CASES = pairwise(FACTORS)


def test_every_pair_is_there() -> None:
    for a, b in itertools.combinations(FACTORS, 2):
        met = {(str(case[a]), str(case[b])) for case in CASES}
        refused = sum(rule.keys() == {a, b} for rule in REFUSED)
        assert len(met) == len(FACTORS[a]) * len(FACTORS[b]) - refused


@pytest.mark.parametrize("pair", REFUSED, ids=lambda pair: "-".join(map(str, pair.values())))
def test_refused_pairs(pair: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"does not go with schedule = '{pair['schedule']}'"):
        run(build(), [], pp=3, **pair)


@pytest.mark.filterwarnings("ignore:2bw with", "ignore:.* microbatches on")
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_equals_the_reference(case: dict[str, Any]) -> None:
    options = dict(case)
    (pp, dp), m, schedule = options.pop("layout"), options.pop("m"), options.pop("schedule")
    # layers with statistics see each replica's samples only, or need fp32
    layers = [layer for i, layer in enumerate(build(tied=options.pop("tied"))) if i not in (1, 4)]
    model, data = nn.Sequential(*layers), build_data(num_samples=2 * m * dp + 1)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    split = choose_split(layers, None, pp)
    delay: Any = DELAY.get(schedule)
    if schedule == "paci":
        delay = stale_first(split, m)
    if schedule == "2bw-fresh":
        delay = stale_first(split, m, extra=1)
        options["update_lag"] = 1
    state, losses, norms = run(
        model, data, schedule, m=m, pp=pp, dp=dp, optimizer=momentum, **options
    )
    expected_norms: list[float] = []
    common: dict[str, Any] = {
        "dp": dp,
        "flush_batches": case["flush_batches"],
        "max_grad_norm": case["max_grad_norm"],
        "dtype": DTYPES[case["precision"]],
        "norms": expected_norms,
    }
    if schedule == "weight-stashing":
        expected = train_stashed(model, nn.MSELoss(), momentum, data, m, split, SEED, **common)
    else:
        expected = train(
            model,
            nn.MSELoss(),
            momentum,
            data,
            m * dp,
            SEED,
            delay=delay,
            lookahead=case["lookahead"],
            backward_on_newest=schedule == "paci",
            **common,
        )
    # Bit for bit where one process would add the same numbers in the same order. Sums over replicas
    # or copies of a tied weight round differently in fp32; in 16 bits such a difference can move a
    # compute copy by one of its own roundings, 2^-8 in bf16, which the next gradients then show.
    # So do tied weights on one stage when layers are run again one by one in 16 bits: the parts of
    # their gradient are then added in fp32, where one backward adds them in 16 bits.
    close = {"rtol": 0.0, "atol": 0.0}
    adds_in_fp32 = case["precision"] != "fp32" and case["recompute"] == "layer"
    if dp > 1 or (case["tied"] and (pp > 1 or adds_in_fp32)):
        close = {"rtol": 1e-4, "atol": 1e-6}
        if case["precision"] != "fp32":
            close = {"rtol": 2e-2, "atol": 2e-3}
    assert list(state) == list(start)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(state[name], tensor, **close)
        assert not torch.equal(tensor, start[name])
    assert losses == pytest.approx(expected, rel=close["rtol"], abs=close["atol"])
    if case["max_grad_norm"] is not None:
        taken = [norm for norm in norms if norm is not None]
        assert taken == pytest.approx(expected_norms, rel=close["rtol"], abs=close["atol"])
