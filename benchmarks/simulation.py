"""What the policies gain, on which plans, and how long it takes to find out.

    python benchmarks/simulation.py throughput  # the best over disttrain, on three plans
    python benchmarks/simulation.py placements  # iteration / ideal: groups, shared boundary, V
    python benchmarks/simulation.py head        # a head split by vocabulary over two ranks
    python benchmarks/simulation.py cluster     # the same with the cost model and transfers
    python benchmarks/simulation.py objective   # plans chosen by simulation
    python benchmarks/simulation.py speed       # time of a comparison

Setting of the first three: the paper's eight (dataset, model) pairs, 64 A40 as 4 replicas of 8
stages, tensor parallelism 2, global batch 512, costs by FLOPs of whole layers, backward = 2 x
forward, no transfers, mean over batches. `benchmarks/schedule.py` has the schedules' own numbers.
"""

import argparse
import dataclasses
import os
import statistics
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from hydra import compose, initialize_config_dir

from lightning_entrain.conf_path import conf_dir
from lightning_entrain.plan.partition import partition_layers
from lightning_entrain.plan_app import make_report
from lightning_entrain.plan_app import register_configs as register_plan_configs
from lightning_entrain.schedule.types import Placement
from lightning_entrain.simulate_app import make_comparison, register_configs
from lightning_entrain.simulation.inputs import PolicyOptions
from lightning_entrain.simulation.results import run_policy
from lightning_entrain.simulation.stage_plan import StagePlan

DATASETS = ("synthchartnet", "llava150k", "chartqa", "cocoqa")
MODELS = ("1b", "3b")
# Encoder:LLM stages of the paper (section 6), in the order of DATASETS.
DISTTRAIN = {"1b": ("4:4", "5:3", "5:3", "4:4"), "3b": ("5:3", "4:4", "4:4", "4:4")}
ENTRAIN = {"1b": ("5:3", "4:4", "5:3", "5:3"), "3b": ("4:4", "3:5", "4:4", "3:5")}

# The order of a V's actions takes longer to find.
TEMPLATE_STEPS = {"one_per_rank": 200_000, "shared_boundary": 200_000, "v_shaped": 300_000}


def composed(name, *overrides):
    with initialize_config_dir(str(conf_dir() / "planning"), version_base="1.3"):
        return compose(name, overrides=list(overrides))


def simulate(data, model, *overrides):
    config = composed("simulate", f"data={data}", f"model=qwen2_5vision_llama3_{model}", *overrides)
    return make_comparison(config, names={"data": data, "model": model})


def pairs():
    for model in MODELS:
        for index, data in enumerate(DATASETS):
            yield model, index, data


def row(*cells):
    print("| " + " | ".join(cells) + " |", flush=True)


def header(*cells):
    row(*cells)
    row(*("---" for _ in cells))


def throughput(num_batches, *overrides):
    """disttrain on the paper's plan for it and on ours, against the best of ours."""
    header(
        "model, data",
        "plan",
        "disttrain /its plan",
        "entrain / its plan",
        "disttrain",
        "entrain",
        "joint",
        "joint_ramp",
        "shared boundary",
        "V",
        "best over disttrain, paper's plan",
        "equal plan",
        "were the step as short as the bottleneck",
    )
    found = []
    for model, index, data in pairs():
        common = [f"num_batches={num_batches}", *overrides]
        paper = simulate(
            data,
            model,
            *common,
            "policies=[disttrain,entrain]",
            f"policy_options.disttrain.stages='{DISTTRAIN[model][index]}'",
            f"policy_options.entrain.stages='{ENTRAIN[model][index]}'",
        )
        ours = simulate(data, model, *common, "policies=[disttrain,entrain,joint,joint_ramp]")
        others = [
            simulate(
                data,
                model,
                *common,
                "policies=[joint_ramp]",
                f"policy_options.joint_ramp.template_steps={TEMPLATE_STEPS[name]}",
                f"strategy.placement={name}",
            )
            .results[0]
            .iteration_ms
            for name in ("shared_boundary", "v_shaped")
        ]
        times = [result.iteration_ms for result in ours.results]
        their = [result.iteration_ms for result in paper.results]
        best = min(*times, *others)
        found.append((their[0] / best, times[0] / min(times), their[0] / their[1]))
        row(
            f"{model} {data}",
            ours.results[0].plan.splits,
            *(f"{ms:,.0f}" for ms in (*their, *times, *others)),
            f"{found[-1][0]:.2f}",
            f"{found[-1][1]:.2f}",
            f"{times[0] / ours.results[-1].bottleneck_ms:.2f}",
        )
    names = ("paper's plan", "equal plan", "entrain over disttrain, paper's plans")
    for name, values in zip(names, zip(*found, strict=True), strict=True):
        mean, least, most = statistics.fmean(values), min(values), max(values)
        print(f"{name}: mean {mean:.2f}, least {least:.2f}, most {most:.2f}")


def placements(num_batches):
    """Bottleneck / ideal and, with ramp, iteration / ideal."""
    names = ("one_per_rank", "shared_boundary", "v_shaped")
    header("model, data", *(cell for name in names for cell in (f"{name}: bottl.", "iteration")))
    found = []
    for model, _, data in pairs():
        cells = []
        for name in names:
            result = simulate(
                data,
                model,
                f"num_batches={num_batches}",
                "policies=[joint_ramp]",
                f"policy_options.joint_ramp.template_steps={TEMPLATE_STEPS[name]}",
                f"strategy.placement={name}",
            ).results[0]
            cells += [result.bottleneck_ms / result.ideal_ms, result.over_ideal]
        found.append(cells)
        row(f"{model} {data}", *(f"{cell:.3f}" for cell in cells))
    for size, part in (("1b", found[:4]), ("3b", found[4:])):
        row(f"mean {size}", *(f"{cell:.3f}" for cell in np.mean(part, axis=0)))


def split_head(setting, shared):
    """The last two ranks each hold half of the head; the half on the last but one is a stage.

    That stage follows the last one, for it needs the last hidden states; the softmax needs both
    halves, so the last stage's backward waits for its backward.
    """
    encoder, llm = (module.total_ms for module in setting.blocks)
    head = float(setting.blocks[1].last_epilogue_ms.sum())
    bare = llm.copy()
    bare[-1] -= head
    best = None
    num = setting.parallel_plan.encoder_stages + setting.parallel_plan.llm_stages
    for cut in cuts(encoder, bare, head, num, shared):
        loads = cut[0]
        if best is None or max(loads) < max(best[0]):
            best = cut
    loads, stages = best
    placement = Placement(
        num_encoder_stages=sum(kind == "e" for kind, *_ in stages),
        num_llm_stages=sum(kind == "l" for kind, *_ in stages) + 1,
        stage_to_rank=(*(rank for _, _, rank in stages), num - 2),
    )
    works = [work for _, work, _ in stages]
    works[-1] += head / 2
    works.append(head / 2)
    totals = [float(encoder.sum())] * placement.num_encoder_stages
    totals += [float(llm.sum())] * placement.num_llm_stages
    none = (0.0,) * num
    return StagePlan(
        name="split head",
        placement=placement,
        encoder_layers=((0, len(encoder)),) * placement.num_encoder_stages,
        llm_layers=((0, len(llm)),) * placement.num_llm_stages,
        shares=tuple(work / total for work, total in zip(works, totals, strict=True)),
        phases=np.full((len(works), 3), 1 / 3),
        module_ms=(float(encoder.sum()), float(llm.sum())),
        rank_ms=tuple(loads),
        state_gib=none,
        saved_gib=none,
        gradient_gib=none,
    )


def cuts(encoder, llm, head, num_ranks, shared):
    """Loads per rank and (module, work, rank) per stage, for all places of the last two ranks."""
    line = np.concatenate([encoder, llm])
    middle, end = len(encoder), len(line)
    sums = np.concatenate([[0], np.cumsum(line)])
    for b in range(middle + 1, end):
        for a in range(num_ranks - 2 if shared else middle, b):
            if shared:
                fronts = [partition_layers(line[:a], num_ranks - 2)]
            else:
                fronts = []
                for e in range(1, num_ranks - 1):
                    m = num_ranks - 2 - e
                    if (m == 0) != (a == middle) or m > a - middle:
                        continue
                    front = partition_layers(encoder, e)
                    if m:
                        rest = partition_layers(line[middle:a], m)
                        front += tuple((x + middle, y + middle) for x, y in rest)
                    fronts.append(front)
            for front in fronts:
                ranges = [*front, (a, b), (b, end)]
                loads = [float(sums[y] - sums[x]) for x, y in ranges]
                loads[-1] += head / 2
                loads[-2] += head / 2
                stages = []
                for rank, (x, y) in enumerate(ranges):
                    if x < middle:
                        stages.append(("e", float(sums[min(y, middle)] - sums[x]), rank))
                for rank, (x, y) in enumerate(ranges):
                    if y > middle:
                        stages.append(("l", float(sums[y] - sums[max(x, middle)]), rank))
                yield loads, stages


def head(num_batches):
    """Bottleneck / ideal, iteration / ideal."""
    header(
        "model, data",
        "groups: bottleneck / ideal",
        "iteration / ideal",
        "split head",
        "",
        "shared boundary, split head",
        "",
    )
    found = []
    for model, _, data in pairs():
        plain = simulate(data, model, f"num_batches={num_batches}", "policies=[joint]")
        cells = [
            plain.results[0].bottleneck_ms / plain.results[0].ideal_ms,
            plain.results[0].over_ideal,
        ]
        runner = plain.setting.runner(
            "joint", PolicyOptions(schedule="auto", limit_by_heaviest=False)
        )
        for shared in (False, True):
            own = dataclasses.replace(runner, plan=split_head(plain.setting, shared))
            result = run_policy(own, plain.setting.drawn, warm_up=False)
            cells += [max(own.plan.rank_ms) / np.mean(own.plan.rank_ms), result.over_ideal]
        found.append(cells)
        row(f"{model} {data}", *(f"{cell:.3f}" for cell in cells))
    for size, part in (("1b", found[:4]), ("3b", found[4:])):
        row(f"mean {size}", *(f"{cell:.3f}" for cell in np.mean(part, axis=0)))


def cluster(num_batches):
    throughput(num_batches, "costs=model", "communication=true")


def objective():
    """Plans of the search, ordered by the paper's formula and by simulation."""
    header(
        "model, data",
        "first by formula",
        "simulated ms",
        "first by simulation",
        "simulated ms",
        "s",
    )
    for model, _, data in pairs():
        start = time.perf_counter()
        config = composed(
            "plan", f"data={data}", f"model=qwen2_5vision_llama3_{model}", "simulate=true"
        )
        plans = make_report(config).result.plans
        seconds = time.perf_counter() - start
        formula = min(plans, key=lambda plan: plan.iteration_ms)
        best = plans[0]
        row(
            f"{model} {data}",
            f"{formula.encoder_stages}:{formula.llm_stages}",
            f"{formula.evaluated_ms:,.0f}",
            f"{best.encoder_stages}:{best.llm_stages}",
            f"{best.evaluated_ms:,.0f}",
            f"{seconds:.1f}",
        )


def speed(num_batches):
    """Wall and processor seconds of the default comparison, code compiled and cached."""
    simulate("synthchartnet", "1b", "num_batches=1")
    wall, cpu = time.perf_counter(), time.process_time()
    found = simulate("synthchartnet", "1b", f"num_batches={num_batches}")
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(
        f"{num_batches} batches x {len(found.names)} policies: {wall:.1f} s, processor {cpu:.1f} s"
    )
    for name, result in zip(found.names, found.results, strict=True):
        print(f"  planning {name:11s} {result.planning_ms:7.1f} ms")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parts = {
        "throughput": throughput,
        "placements": placements,
        "head": head,
        "cluster": cluster,
        "objective": lambda _: objective(),
        "speed": speed,
    }
    parser.add_argument("what", choices=list(parts))
    parser.add_argument("--num-batches", type=int, default=8)
    options = parser.parse_args()
    register_configs()
    register_plan_configs()
    parts[options.what](options.num_batches)


if __name__ == "__main__":
    main()
