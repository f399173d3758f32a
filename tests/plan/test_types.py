"""The plan record."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from lightning_entrain.errors import ConfigError
from lightning_entrain.plan.types import ParallelPlan, StagePrediction, Supported

STAGE = StagePrediction(
    module="encoder",
    start=0,
    stop=4,
    forward_ms=1.0,
    backward_ms=2.0,
    state_gib=3.0,
    activation_gib=0.5,
    buffer_gib=0.25,
    in_flight=3,
)
PLAN = ParallelPlan(
    dp=2,
    encoder_layers=((0, 2), (2, 4)),
    llm_layers=((0, 3),),
    num_microbatches=8,
    global_batch_size=32,
    b_min=16,
    proportions={"encoder": 0.6, "llm": 0.4},
    trials={1: ("3:1", "2:2"), 16: ("2:2",)},
    stages=(STAGE,),
    iteration_ms=12.5,
    tokens_per_s=1000.0,
)


def test_round_trip() -> None:
    assert ParallelPlan.from_json(PLAN.to_json()) == PLAN


def test_keys_that_other_tools_read() -> None:
    record = json.loads(PLAN.to_json())
    expected = {"dp", "encoder_stages", "llm_stages", "encoder_tp", "llm_tp", "num_microbatches"}
    expected |= {"encoder_layers_per_stage", "llm_layers_per_stage", "b_min", "proportions"}
    expected |= {"trials", "iteration_ms", "stages"}
    assert expected <= set(record)
    assert record["trials"] == {"1": ["3:1", "2:2"], "16": ["2:2"]}
    assert record["encoder_layers_per_stage"] == [2, 2]


def test_unset_predictions_survive_json() -> None:
    bare = replace(PLAN, stages=(), iteration_ms=float("nan"), tokens_per_s=float("nan"))
    text = bare.to_json()
    assert "NaN" not in text
    assert ParallelPlan.from_json(text).digest() == bare.digest()


def test_derived_numbers() -> None:
    assert (PLAN.encoder_stages, PLAN.llm_stages, PLAN.gpus_per_replica) == (2, 1, 3)
    assert PLAN.num_gpus == 6
    assert PLAN.microbatch_size == 2
    assert STAGE.memory_gib == 3.75
    assert STAGE.time_ms == 3


def test_digest_covers_decisions_only() -> None:
    assert replace(PLAN, iteration_ms=1.0, b_min=4).digest() == PLAN.digest()
    for change in ({"dp": 1}, {"num_microbatches": 4}, {"llm_layers": ((0, 4),)}, {"llm_tp": 2}):
        assert replace(PLAN, **change).digest() != PLAN.digest()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dp": 0}, "plan.dp is 0"),
        ({"dp": 2.5}, "plan.dp is 2.5"),
        ({"dp": True}, "plan.dp is True"),
        ({"num_microbatches": 0}, "num_microbatches is 0"),
        ({"encoder_layers": [[0, 2], [3, 4]]}, "encoder_layers"),
        ({"encoder_layers": [[0, 2], [2, 2]]}, "encoder_layers"),
        ({"llm_layers": []}, "llm_layers is empty"),
        ({"llm_layers": [3]}, "a list of"),
        ({"global_batch_size": 33}, "global_batch_size is 33"),
        ({"version": 99}, "version is 99"),
        ({"colour": "red"}, "unknown key 'colour'"),
        ({"num_microbatches": 4}, "digest"),
    ],
)
def test_bad_records(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ParallelPlan.from_dict({**PLAN.to_dict(), **change})


def test_missing_keys_and_broken_text() -> None:
    record = PLAN.to_dict()
    del record["llm_layers"]
    with pytest.raises(ConfigError, match="no llm_layers"):
        ParallelPlan.from_dict(record)
    with pytest.raises(ConfigError, match="not JSON"):
        ParallelPlan.from_json("{")
    with pytest.raises(ConfigError, match="list"):
        ParallelPlan.from_dict([])  # type: ignore[arg-type]


def test_unsupported_fields_are_named() -> None:
    Supported().require(PLAN)
    with pytest.raises(ConfigError, match=r"plan\.encoder_tp=2 is not runnable yet"):
        Supported().require(replace(PLAN, encoder_tp=2))
    mixed = replace(PLAN, encoder_tp=2)
    assert Supported(tp=(1, 2)).problems(mixed) == ("llm_tp=1 (encoder_tp=2)",)
    assert Supported(tp=(1, 2), unequal_tp=True).problems(mixed) == ()
