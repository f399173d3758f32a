"""The measured cost model: fitting, matching, refusing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

from lightning_entrain.errors import ConfigError
from lightning_entrain.workload.costs import module_cost
from lightning_entrain.workload.datasets import sample_sizes
from lightning_entrain.workload.hf_config import model_shape
from lightning_entrain.workload.measured import (
    Fit,
    LayerProfile,
    MeasuredCostModel,
    Measurement,
    Profile,
    fit_times,
    layer_key,
)
from lightning_entrain.workload.memory import Training

MODELS = Path(__file__).parents[2] / "conf" / "planning" / "model"
SHAPE = model_shape(yaml.safe_load((MODELS / "tiny_vlm.yaml").read_text()), name="tiny")
FIT = Fit(per_pair=1e-6, per_row=1e-3, constant=0.5, residual=0.0)


def profile() -> Profile:
    layers = dict.fromkeys(SHAPE.encoder.layers + SHAPE.llm.layers)
    twice = Fit(per_pair=2e-6, per_row=2e-3, constant=1.0, residual=0.0)
    return Profile(
        device="a40",
        dtype="bfloat16",
        versions={"torch": "2"},
        threads=1,
        model="tiny",
        layers=tuple(
            LayerProfile(kind=x.kind, key=layer_key(x), tp=1, forward=FIT, backward=twice)
            for x in layers
        ),
    )


def test_exact_times_give_their_coefficients() -> None:
    rows = np.array([64.0, 256, 1024, 4096, 1024])
    pairs = np.array([64.0, 256, 1024, 4096, 512]) * rows
    fit = fit_times(rows, pairs, FIT.predict(pairs, rows, np.ones(5)))
    assert fit.per_pair == pytest.approx(1e-6)
    assert fit.per_row == pytest.approx(1e-3)
    assert fit.constant == pytest.approx(0.5)
    assert fit.residual < 1e-9


@given(st.lists(st.floats(0.01, 1e3), min_size=5, max_size=12), st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_equals_nnls(times: list[float], seed: int) -> None:
    generator = np.random.default_rng(seed)
    rows = generator.uniform(16, 4096, len(times))
    pairs = rows * generator.uniform(16, 4096, len(times))
    fit = fit_times(rows, pairs, times)
    assert min(fit.per_pair, fit.per_row, fit.constant) >= 0
    table = np.stack([pairs / 1e6, rows / 1e3, np.ones(len(times))], 1) / np.array(times)[:, None]
    _, reference = nnls(table, np.ones(len(times)))
    assert fit.residual * np.sqrt(len(times)) == pytest.approx(reference, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("times", [[], [1.0, 0.0], [1.0, float("nan")]])
def test_bad_times(times: list[float]) -> None:
    with pytest.raises(ConfigError, match="above 0"):
        fit_times([1.0] * len(times), [1.0] * len(times), times)


def test_round_trip() -> None:
    item = replace(
        profile().layers[0],
        measurements=(Measurement(rows=64, pairs=64, forward_ms=1.0, backward_ms=2.0, spread=0.1),),
    )
    record = replace(profile(), layers=(item,))
    assert Profile.from_json(record.to_json()) == record


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"version": 9}', '{"version": 1, "layers": [{}], "device": "a"}']
)
def test_broken_records(text: str) -> None:
    with pytest.raises(ConfigError, match="profile"):
        Profile.from_json(text)


def test_other_devices_and_dtypes_are_refused() -> None:
    record = profile()
    record.require(device="a40", dtype="bfloat16")
    with pytest.raises(ConfigError, match="device is 'a40', wanted is 'h100'"):
        record.require(device="h100", dtype="bfloat16")
    with pytest.raises(ConfigError, match="dtype is 'bfloat16', wanted is 'float32'"):
        record.require(device="a40", dtype="float32")
    record.require(device="h100", dtype="float32", allow_other=True)


def test_a_microbatch_is_not_one_long_sequence() -> None:
    table = sample_sizes("llava150k", 4, 0)
    load = SHAPE.llm.load(table)
    model = MeasuredCostModel(profile())
    forward, backward = module_cost(SHAPE.llm, load.sum(), model, Training())
    rows, pairs = table.num_tokens.sum(), (table.num_tokens**2).sum()
    layers = len(SHAPE.llm.layers)
    expected = 4 * 1e-6 * pairs + layers * (1e-3 * rows + 0.5)
    assert forward[0] == pytest.approx(expected)
    assert backward[0] == pytest.approx(2 * expected)
    apart = module_cost(SHAPE.llm, load, model, Training(), rows_together=float(rows))[0]
    assert apart.sum() == pytest.approx(expected)


def test_frozen_layers_skip_the_weights_part() -> None:
    load = SHAPE.llm.load(sample_sizes("llava150k", 4, 0)).sum()
    model = MeasuredCostModel(profile())
    full = module_cost(SHAPE.llm, load, model, Training())[1][0]
    frozen = module_cost(SHAPE.llm, load, model, Training(llm="frozen"))[1][0]
    assert 0.4 * full < frozen < 0.7 * full


def test_unknown_layers_and_tp() -> None:
    model = MeasuredCostModel(replace(profile(), layers=profile().layers[:1]))
    load = SHAPE.llm.load(sample_sizes("llava150k", 2, 0)).sum()
    with pytest.raises(ConfigError, match="no embedding of this shape at tp 1"):
        module_cost(SHAPE.llm, load, model, Training())
    with pytest.raises(ConfigError, match="at tp 2"):
        module_cost(SHAPE.llm, load, MeasuredCostModel(profile()), Training(), tp=2)
