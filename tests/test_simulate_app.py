"""The app entrain-simulate."""

import importlib.util
import io
import itertools
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from rich.console import Console

from lightning_entrain.conf_path import conf_dir
from lightning_entrain.errors import EntrainError
from lightning_entrain.plan_app import make_report
from lightning_entrain.plan_app import register_configs as register_plan_configs
from lightning_entrain.simulate_app import make_comparison, register_configs, write_files
from lightning_entrain.simulate_report import print_comparison

FOLDER = str(conf_dir() / "planning")
KEYS = [
    "policy",
    "schedule",
    "encoder_stages",
    "llm_stages",
    "num_microbatches",
    "iteration_time",
    "bottleneck_time",
    "ideal_time",
    "bound_time",
    "bubble_ratio",
    "encoder_std",
    "llm_std",
    "encoder_cv",
    "llm_cv",
    "peak_live_microbatches",
    "planning_ms",
]
SMALL = ["data.num_samples=600", "num_batches=1", "global_batch_size=128"]


def compare(*overrides, names=None):
    register_configs()
    with initialize_config_dir(FOLDER, version_base="1.3"):
        config = compose("simulate", overrides=[*SMALL, *overrides])
    return make_comparison(config, names=names)


@pytest.fixture(scope="module")
def found():
    return compare("policies=[fixed,disttrain,dip,entrain,joint,joint_ramp]", "num_batches=2")


def test_json_has_the_documented_keys(found, tmp_path):
    write_files(tmp_path, found)
    record = json.loads((tmp_path / "simulation.json").read_text())
    assert list(record) == ["setting", "results"]
    assert [list(result) for result in record["results"]] == [KEYS] * 6
    assert [result["policy"] for result in record["results"]] == list(found.names)
    for result in record["results"]:
        stages = result["encoder_stages"] + result["llm_stages"]
        assert len(result["peak_live_microbatches"]) == stages
    assert record["setting"]["replicas"] == 4
    assert record["setting"]["policies"]["joint_ramp"]["ramp"] is True


def test_times_are_in_order_and_better_policies_are_faster(found):
    by_name = dict(zip(found.names, found.results, strict=True))
    for result in found.results:
        assert result.ideal_ms <= result.bottleneck_ms * (1 + 1e-9)
        assert result.bottleneck_ms <= result.bound_ms * (1 + 1e-9)
        assert result.bound_ms <= result.iteration_ms * (1 + 1e-9)
        idle = 1 - result.ideal_ms / result.iteration_ms
        assert result.bubble_ratio == pytest.approx(idle, abs=0.01)
    assert by_name["joint"].iteration_ms < 0.9 * by_name["fixed"].iteration_ms
    assert by_name["joint_ramp"].iteration_ms <= by_name["joint"].iteration_ms * (1 + 1e-9)
    assert by_name["joint"].encoder.cv < by_name["entrain"].encoder.cv
    assert by_name["dip"].encoder.std < 0.75 * by_name["fixed"].encoder.std
    assert by_name["dip"].llm.std == pytest.approx(by_name["fixed"].llm.std)
    # Forward is a third of F, I and W by FLOPs, and the microbatches share it.
    fixed, drawn = by_name["fixed"], found.setting.drawn
    num = 4 * fixed.num_microbatches
    for spread, times in (("encoder", "encoder_ms"), ("llm", "llm_ms")):
        mean = np.mean([getattr(batch, times).sum() / 3 / num for batch in drawn])
        assert getattr(fixed, spread).mean == pytest.approx(mean)
    # The same work, whatever the policy.
    work = [result.ideal_ms for result in found.results]
    assert work == pytest.approx([work[0]] * 6)


def test_equal_seeds_give_equal_results(found):
    again = compare("policies=[joint]", "num_batches=2").results[0]
    before = found.results[found.names.index("joint")]
    assert (again.iterations_ms, again.schedule) == (before.iterations_ms, before.schedule)
    other = compare("policies=[joint]", "num_batches=2", "seed=1").results[0]
    assert other.iterations_ms != before.iterations_ms


def test_traces_hold_every_action_once_and_no_rank_does_two_things(found, tmp_path):
    write_files(tmp_path, found)
    for name, result in zip(found.names, found.results, strict=True):
        trace = json.loads((tmp_path / f"trace_{name}.json").read_text())
        events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        assert len(events) == sum(len(timeline.rows) for timeline in result.timelines)
        assert {event["pid"] for event in events} == set(range(4))
        last = max(event["ts"] + event["dur"] for event in events)
        assert last == pytest.approx(1e3 * result.iterations_ms[0])
        for pid, tid in {(event["pid"], event["tid"]) for event in events}:
            own = sorted(
                (event["ts"], event["ts"] + event["dur"])
                for event in events
                if (event["pid"], event["tid"]) == (pid, tid)
            )
            assert all(b[0] >= a[1] - 1e-6 for a, b in itertools.pairwise(own))


def test_the_table_names_every_policy_and_the_files(found, tmp_path):
    buffer = io.StringIO()
    paths = write_files(tmp_path, found)
    print_comparison(found, files=paths, console=Console(file=buffer, width=160))
    text = buffer.getvalue()
    for part in (*found.names, "bubble %", "/ ideal", "x fixed", "report.html", "5:3", "a40"):
        assert part in text
    assert "transfers not counted" in text
    predicted = f"{found.setting.parallel_plan.iteration_ms:,.0f} ms"
    assert f"entrain-plan predicts {predicted} for its plan with analytic (a40) costs" in text


def test_microbatches_are_counted_as_they_ran(found):
    few = compare("policies=[entrain,joint]", "policy_options.joint.limit_by_heaviest=false")
    entrain, joint = few.results
    plan = few.setting.parallel_plan.num_microbatches
    assert joint.microbatch_counts == (plan, plan)
    assert joint.counts_text == str(plan)
    assert entrain.microbatch_counts[0] < plan
    assert few.to_json()["results"][0]["num_microbatches"] == list(entrain.microbatch_counts)
    assert replace(joint, microbatch_counts=(24, 32)).counts_text == "24-32"


def test_memory_just_above_the_devices_is_printed_as_more_and_with_a_remedy(found):
    usable = found.setting.request.cluster.usable_bytes / 2**30
    result = replace(found.results[0], peak_gib=(usable + 0.001,))
    (text,) = replace(found, names=("fixed",), results=(result,)).warnings
    limit, amount = re.search(r"the ([\d.]+) GiB .*: fixed ([\d.]+)\.", text).groups()
    assert float(amount) > float(limit)
    assert f"Remedy: memory_gib={limit}" in text


def test_transfers_overhead_and_the_cost_model_cost_time():
    plain = compare("policies=[joint]").results[0]
    moved = compare("policies=[joint]", "communication=true", "cluster.network_gbps=0.5")
    assert moved.results[0].iteration_ms > 1.02 * plain.iteration_ms
    slower = compare("policies=[joint]", "overhead=0.02").results[0]
    assert slower.iteration_ms > 1.01 * plain.iteration_ms
    assert slower.bottleneck_ms == pytest.approx(plain.bottleneck_ms)
    model = compare("policies=[joint]", "costs=model").results[0]
    assert model.iteration_ms > plain.iteration_ms  # FLOPs at full speed are a lower limit.
    phases = model.plan.phases.mean(axis=0)
    assert phases.sum() == pytest.approx(1)
    assert phases[2] < phases[1]  # W has no attention.


@pytest.mark.parametrize(
    ("placement", "num_stages"), [("shared_boundary", (8, 9)), ("v_shaped", (16,))]
)
def test_placements_even_the_ranks(placement, num_stages):
    groups = compare("policies=[joint]").results[0]
    other = compare("policies=[joint]", f"strategy.placement={placement}").results[0]
    assert len(other.plan.placement.stage_to_rank) in num_stages
    assert other.plan.placement.num_ranks == 8
    assert other.bottleneck_ms < groups.bottleneck_ms
    assert sum(other.plan.rank_ms) == pytest.approx(sum(groups.plan.rank_ms))
    layers = [other.plan.encoder_layers[-1][1], other.plan.llm_layers[-1][1]]
    assert layers == [32, 16]


def test_a_plan_and_a_size_table_from_files(tmp_path):
    register_plan_configs()
    with initialize_config_dir(FOLDER, version_base="1.3"):
        plan = make_report(compose("plan", overrides=["data.num_samples=600"])).plan
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    sizes = tmp_path / "sizes.csv"
    rng = np.random.default_rng(0)
    rows = [f"{rng.integers(50, 900)},{rng.integers(5, 300)}" for _ in range(100)]
    sizes.write_text("\n".join(["vision_tokens,text_tokens", *rows, "0,40"]) + "\n")
    found = compare(f"strategy.plan={path}", f"data.sizes={sizes}", "policies=[fixed,joint]")
    assert found.results[0].plan.encoder_layers == plan.encoder_layers
    assert found.described["data"] == str(sizes)
    assert found.described["num_samples"] == 101
    assert found.described["global_batch_size"] == plan.global_batch_size
    assert found.results[1].iteration_ms < found.results[0].iteration_ms


def test_a_policy_can_be_added_under_another_name():
    lagged = "+policy_options.lagged={policy:joint,schedule:auto,max_lag:1,limit_by_heaviest:false}"
    found = compare("policies=[joint,lagged]", lagged)
    assert found.to_json()["results"][1]["policy"] == "lagged"
    assert found.results[1].iteration_ms != found.results[0].iteration_ms


def test_k_is_chosen_by_simulation():
    some = [
        compare("policies=[joint]", f"policy_options.joint.num_microbatches={k}") for k in (6, 9)
    ]
    best = compare("policies=[joint]", "policy_options.joint.num_microbatches=[6,9]").results[0]
    assert best.iteration_ms == min(found.results[0].iteration_ms for found in some)


def test_steps_start_from_an_order_found_once_for_the_plan():
    own = ["strategy.placement=v_shaped", "max_live=9"]
    steps = "policy_options.joint_ramp.template_steps"
    found = compare("policies=[joint_ramp]", f"{steps}=9000", *own)
    plain = compare("policies=[joint]", "policy_options.joint.template_steps=0", *own)
    assert found.results[0].iteration_ms < 0.99 * plain.results[0].iteration_ms
    assert found.results[0].peak_mean <= 9 * (1 + 1e-6)
    again = compare("policies=[joint_ramp]", f"{steps}=9000", *own)
    assert again.results[0].iteration_ms == found.results[0].iteration_ms


def test_the_least_memory_in_the_message_does(tmp_path):
    for option in ("max_live", "memory_gib"):
        with pytest.raises(EntrainError, match="too little for any schedule") as info:
            compare("policies=[joint]", f"{option}=0.5")
        least = info.value.limit.split()[-1]
        fits = compare("policies=[joint]", f"{option}={least}")
        assert not [text for text in fits.warnings if option in text]
        with pytest.raises(EntrainError, match="too little"):
            compare("policies=[joint]", f"{option}={float(least) * 0.97:.3f}")


def test_baselines_above_the_memory_are_shown_and_said():
    found = compare("policies=[fixed,joint]", "max_live=4")
    assert found.results[1].peak_mean <= 4 * (1 + 1e-6)
    assert any("max_live: fixed" in text for text in found.warnings)


BAD = [
    (["policies=[fixed,foo]"], "policy 'foo'. Limit: some of fixed, disttrain"),
    (["policies=[]"], "policies is empty"),
    (["policies=[joint,joint]"], "each once"),
    (["baseline=dip", "policies=[joint]"], "baseline is 'dip'"),
    (["num_batches=0"], "num_batches is 0"),
    (["costs=guess"], "costs is 'guess'"),
    (["overhead=-1"], "overhead is -1"),
    (["max_live=0"], "max_live is 0"),
    (["strategy.placement=ring"], "strategy.placement is 'ring'"),
    (["strategy.stage_choice=luck"], "strategy.stage_choice is 'luck'"),
    (["policy_options.fixed.stages=9:9"], "36 GPUs per replica"),
    (["policy_options.fixed.stages=many"], "stages is 'many'"),
    (["policy_options.fixed.schedule=2f2b"], "policy_options.fixed.schedule is '2f2b'"),
    (["policy_options.fixed.ramp=true"], "only joint"),
    (["policy_options.joint.num_microbatches=[0]"], "num_microbatches is 0"),
    (["policy_options.joint.num_microbatches=few"], "num_microbatches is 'few'"),
    (["+policy_options.joint.speed=9"], "policy_options.joint: Key 'speed'"),
    (["policy_options.joint.max_lag=some"], "policy_options.joint: Value 'some'"),
    (["policy_options.joint.max_lag=2"], "max_lag is 2"),
    (["data.sizes=missing.csv"], "missing.csv"),
    (["strategy.plan=missing.json"], "strategy.plan=missing.json cannot be read"),
    (
        ["policies=[joint_ramp]", "policy_options.joint_ramp.template_steps=0"],
        "template_steps is 0",
    ),
    (["strategy.placement=v_shaped", "llm_tp=1", "encoder_tp=2"], "equal tensor parallelism"),
]


@pytest.mark.parametrize(("overrides", "message"), BAD)
def test_bad_input_is_one_clear_error(overrides, message):
    with pytest.raises(EntrainError) as info:
        compare(*overrides)
    assert message in str(info.value)


def test_less_data_than_a_global_batch_is_warned_of():
    text = "The table holds 100 samples, fewer than a global batch of 128"
    assert compare("policies=[fixed]", "data.num_samples=100").warnings[0].startswith(text)
    assert not any("fewer than" in w for w in compare("policies=[fixed]").warnings)


def test_a_table_of_zeros_is_one_clear_error(tmp_path):
    path = tmp_path / "zeros.csv"
    path.write_text("vision_tokens,text_tokens\n" + "0,0\n" * 9)
    with pytest.raises(EntrainError, match=r"All 9 samples of .*zeros\.csv have 0 tokens.*Remedy"):
        compare(f"data.sizes={path}")


def test_a_plan_for_other_gpus_or_another_model_is_refused(tmp_path):
    register_plan_configs()
    with initialize_config_dir(FOLDER, version_base="1.3"):
        plan = make_report(compose("plan", overrides=["data.num_samples=600"])).plan
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    with pytest.raises(EntrainError, match=r"The plan is for 64 GPUs .*the cluster has 8"):
        compare(f"strategy.plan={path}", "cluster=h100_8")
    with pytest.raises(EntrainError, match="llm_layers ends at layer 16"):
        compare(f"strategy.plan={path}", "model=qwen2_5vision_llama3_3b")
    path.write_text(replace(plan, encoder_tp=8, llm_tp=8, dp=1).to_json())
    with pytest.raises(EntrainError, match="tensor parallelism 8"):
        compare(
            f"strategy.plan={path}",
            f"cluster.num_gpus={replace(plan, encoder_tp=8, llm_tp=8, dp=1).num_gpus}",
        )


def test_the_command(tmp_path):
    command = [sys.executable, "-m", "lightning_entrain.simulate_app", *SMALL]
    run = subprocess.run(
        [*command, "policies=[fixed]", f"output={tmp_path}"], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert {path.name for path in tmp_path.iterdir()} == {
        "simulation.json",
        "report.html",
        "trace_fixed.json",
    }
    run = subprocess.run([*command, "policies=[foo]"], capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr.startswith("Error: policy 'foo'")
    assert len(run.stderr.splitlines()) == 1


def test_plans_can_be_chosen_by_simulation():
    register_plan_configs()
    with initialize_config_dir(FOLDER, version_base="1.3"):
        base = ["data.num_samples=600", "global_batch_size=128", "num_best=3", "b_min.trials=5"]
        plain = make_report(compose("plan", overrides=base))
        best = make_report(compose("plan", overrides=[*base, "simulate=true"]))
    assert plain.plan.evaluated_ms is None
    times = [plan.evaluated_ms for plan in best.result.plans]
    assert times == sorted(times)
    assert {plan.digest() for plan in plain.result.plans} == {
        plan.digest() for plan in best.result.plans
    }
    # The paper's formula and the simulation agree on the scale.
    assert times[0] == pytest.approx(best.plan.iteration_ms, rel=0.3)


def test_the_papers_tables_can_be_made(tmp_path, capsys):
    path = Path(__file__).parents[1] / "examples" / "reproduce_paper.py"
    spec = importlib.util.spec_from_file_location("reproduce_paper", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(["--quick", "--output", str(tmp_path)])
    text = capsys.readouterr().out
    assert text.count("\n## ") + text.startswith("## ") == len(module.PARTS)
    assert "| 1b chartqa | 256 | 11:5 | 10:6 |" in text
    assert "61.34 / 73.42 / 15.23" in text
    assert (tmp_path / "1b_chartqa" / "report.html").is_file()
    # Every row of a table has as many cells as its head.
    widths = [line.count("|") for line in text.splitlines() if line.startswith("|")]
    heads = [line.count("|") for line in text.splitlines() if line.startswith("| ---")]
    assert set(widths) == set(heads)
    with pytest.raises(SystemExit):
        module.main(["tables"])
