"""Cuts for ranks that hold several stages, and plans that carry them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_entrain.errors import ConfigError
from lightning_entrain.plan.layout import LayoutRequest
from lightning_entrain.plan.placements import PLACEMENTS, LayerCut, cut_layers, cut_modules
from lightning_entrain.plan.types import ParallelPlan
from lightning_entrain.schedule.types import Placement

SEVERAL = [name for name in PLACEMENTS if name != "one_per_rank"]
WORK = st.lists(st.floats(0.1, 10.0), min_size=4, max_size=12)


def rank_work(cut: LayerCut, encoder_ms: list[float], llm_ms: list[float]) -> list[float]:
    found = [0.0] * cut.placement.num_ranks
    stages = [sum(encoder_ms[a:b]) for a, b in cut.encoder_layers]
    stages += [sum(llm_ms[a:b]) for a, b in cut.llm_layers]
    for rank, work in zip(cut.placement.stage_to_rank, stages, strict=True):
        found[rank] += work
    return found


@given(encoder_ms=WORK, llm_ms=WORK, num_ranks=st.integers(1, 4), name=st.sampled_from(SEVERAL))
def test_every_layer_lies_on_one_rank(
    encoder_ms: list[float], llm_ms: list[float], num_ranks: int, name: str
) -> None:
    cut = cut_layers(name, num_ranks, encoder_ms, llm_ms)
    assert cut.placement.num_ranks == num_ranks
    for layers, work in ((cut.encoder_layers, encoder_ms), (cut.llm_layers, llm_ms)):
        assert layers[0][0] == 0
        assert layers[-1][1] == len(work)
        assert all(a < b for a, b in layers)
        assert all(first[1] == second[0] for first, second in pairwise(layers))
    assert sum(rank_work(cut, encoder_ms, llm_ms)) == pytest.approx(sum(encoder_ms) + sum(llm_ms))


@given(encoder_ms=WORK, llm_ms=WORK, num_ranks=st.integers(2, 4))
def test_a_shared_boundary_is_never_worse_than_none(
    encoder_ms: list[float], llm_ms: list[float], num_ranks: int
) -> None:
    shared = max(rank_work(cut_layers("shared_boundary", num_ranks, encoder_ms, llm_ms),
                           encoder_ms, llm_ms))  # fmt: skip
    for encoder in range(1, num_ranks):
        layers = cut_modules(encoder, num_ranks - encoder, encoder_ms, llm_ms)
        apart = LayerCut(
            placement=Placement.one_per_rank(encoder, num_ranks - encoder),
            encoder_layers=layers[0],
            llm_layers=layers[1],
        )
        assert shared <= max(rank_work(apart, encoder_ms, llm_ms)) * (1 + 1e-9)


def test_a_v_evens_what_rows_cannot() -> None:
    """A heavy last layer goes together with light first ones."""
    encoder_ms, llm_ms = [1.0] * 8, [1.0] * 7 + [4.0]
    cut = cut_layers("v_shaped", 2, encoder_ms, llm_ms)
    assert cut.placement.stage_to_rank == (0, 1, 1, 0)
    assert rank_work(cut, encoder_ms, llm_ms) == [pytest.approx(9.5, abs=0.6)] * 2


@pytest.mark.parametrize(
    ("name", "num_ranks", "message"),
    [
        ("v_shaped", 4, r"v_shaped with 4 ranks\. Limit: two chunks .* 8 in all"),
        ("shared_boundary", 7, r"shared_boundary with 7 ranks\. Limit: a layer per rank, 6"),
        ("colocated", 4, r"colocated with 4 ranks\. Limit: .* at most 3 ranks"),
    ],
)
def test_too_few_layers(name: str, num_ranks: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cut_layers(name, num_ranks, [1.0] * 3, [1.0] * 3)
    with pytest.raises(ConfigError, match=f"{num_ranks} ranks.*at most|with {num_ranks} ranks"):
        LayoutRequest(world_size=num_ranks, placement=name).check_depth(
            encoder_layers=3, llm_layers=3
        )


PLAN = ParallelPlan(
    dp=2,
    encoder_layers=((0, 2), (2, 4)),
    llm_layers=((0, 1), (1, 4)),
    stage_to_rank=(0, 1, 1, 0),
    num_microbatches=4,
    global_batch_size=16,
)


def test_a_plan_keeps_its_ranks() -> None:
    again = ParallelPlan.from_json(PLAN.to_json())
    assert again == PLAN
    assert again.placement == Placement.v_shaped(2, 2)
    assert (PLAN.gpus_per_replica, PLAN.num_gpus) == (2, 4)
    apart = replace(PLAN, stage_to_rank=None)
    assert apart.num_gpus == 8
    assert apart.digest() != PLAN.digest()


@pytest.mark.parametrize("ranks", [(0, 1, 1), (0, 2, 2, 0), (0, 1, 1, True), (1, 2, 2, 1)])
def test_ranks_of_a_plan_that_make_no_sense(ranks: tuple[int, ...]) -> None:
    with pytest.raises(
        ConfigError, match=r"plan\.stage_to_rank is \[.*Limit: a rank for each of 4"
    ):
        replace(PLAN, stage_to_rank=ranks)


def test_ranks_of_a_plan_beside_tensor_parallelism() -> None:
    with pytest.raises(ConfigError, match="one GPU per rank"):
        replace(PLAN, encoder_tp=2, llm_tp=2)
