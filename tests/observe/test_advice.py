"""Advice names what costs most, and says nothing where nothing does."""

from lightning_entrain.observe.advice import RunFacts, advise
from lightning_entrain.observe.better_plan import better_plan, corrected_layers
from lightning_entrain.plan.layout import StageLayout
from lightning_entrain.schedule.types import Placement

NAMES = ("encoder stage 0", "LLM stage 0", "LLM stage 1")


def test_a_balanced_run_gets_one_calm_sentence():
    (text,) = advise(RunFacts(rank_names=NAMES, rank_busy_ms=(10, 10, 10.5), num_stages=3))
    assert text.startswith("Nothing stands out")


def test_the_bottleneck_comes_first_with_its_cause_and_the_better_plan():
    facts = RunFacts(
        num_stages=3,
        num_microbatches=4,
        bubble={"imbalance": 0.3, "fill_drain": 0.2, "communication": 0.05},
        rank_names=NAMES,
        rank_busy_ms=(10, 30, 10),
        stage_drift={"encoder stage 0": 0.8, "LLM stage 0": 2.0},
        better_plan="1 encoder stage of 4 layers and 2 LLM stages of 1+3 layers",
        better_plan_gain=0.2,
    )
    first, second = advise(facts)
    assert first.startswith("LLM stage 0 is the bottleneck: it computes 1.80 times")
    assert "2.00 times as long as the cost model predicts" in first
    assert (
        "1 encoder stage of 4 layers and 2 LLM stages of 1+3 layers would save about 20%" in first
    )
    assert "(num_microbatches=8 with global_batch_size=8 or more)" in second


def test_a_better_policy_is_named_with_its_gain():
    facts = RunFacts(policy="fixed", policy_ms={"entrain": 8.0, "fixed": 10.0}, own_ms=10.0)
    (text,) = advise(facts)
    assert "'entrain'" in text
    assert "20%" in text


def test_more_microbatches_are_advised_where_the_data_has_samples_for_them():
    known = {"num_stages": 2, "num_microbatches": 4, "bubble": {"fill_drain": 0.3}}
    known |= {"num_replicas": 2, "data_options": "data."}
    (text,) = advise(RunFacts(**known, global_batch_size=16))
    assert "(data.num_microbatches=8) would" in text
    (text,) = advise(RunFacts(**known, global_batch_size=15, num_train_samples=16))
    assert "data.num_microbatches=8 with data.global_batch_size=16 or more" in text
    (text,) = advise(RunFacts(**known, global_batch_size=15, num_train_samples=15))
    assert text.startswith("Nothing stands out")


def test_waiting_for_data_or_planning_is_told():
    assert "raise num_workers." in advise(RunFacts(data_wait_share=0.4))[0]
    hydra = RunFacts(data_wait_share=0.4, planning_share=0.4, data_options="data.")
    assert "raise data.num_workers." in advise(hydra)[0]
    assert "Planning" in advise(RunFacts(planning_share=0.4))[0]
    assert advise(RunFacts(batch_size_text="Small batch."))[-1] == "Small batch."


def test_the_better_plan_moves_layers_away_from_what_is_slow():
    layout = StageLayout(
        num_replicas=1,
        encoder_ranges=((0, 2),),
        llm_ranges=((0, 3), (3, 6)),
        placement=Placement.one_per_rank(1, 2),
    )
    even = better_plan(layout, [3.0, 3.0], [2.0] * 6, 4)
    assert even.gain == 0.0
    slow = corrected_layers([2.0] * 6, layout.llm_ranges, [1.0, 3.0])
    assert slow == [2.0] * 3 + [6.0] * 3
    found = better_plan(layout, [3.0, 3.0], slow, 4)
    assert found.llm_layers == ((0, 4), (4, 6))
    # Stages of 6, 6, 18 ms against 6, 12, 12: (30 + 3 x 18) against (30 + 3 x 12).
    assert abs(found.gain - (1 - 66 / 84)) < 1e-12
    assert found.describe() == "1 encoder stage of 2 layers and 2 LLM stages of 4+2 layers"
