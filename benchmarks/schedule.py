"""How fast schedules are made, and how close they come to their limits.

    python benchmarks/schedule.py speed
    python benchmarks/schedule.py gaps       # iteration / bottleneck
    python benchmarks/schedule.py variants   # tighter memory, unequal I and W, noise, K chosen
    python benchmarks/schedule.py placements # iteration / ideal: groups, shared boundary, V
    python benchmarks/schedule.py deferral   # what deferral costs or gains, at equal memory

Setting: the paper's eight (dataset, model) pairs, 8 ranks per replica, 4 replicas, global batch
512, costs by FLOPs of whole layers, backward = 2 x forward (I = W = forward), no communication;
memory of 9 mean microbatches per rank; mean over batches of the slowest replica's iteration.
"""

import argparse
import dataclasses
import itertools
import os
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import yaml

from lightning_entrain.assign.api import assign_samples
from lightning_entrain.plan.partition import partition_layers, stage_costs
from lightning_entrain.schedule.choose import choose_schedule
from lightning_entrain.schedule.lower import lower
from lightning_entrain.schedule.one_f_one_b import build_1f1b
from lightning_entrain.schedule.predict import replica_step
from lightning_entrain.schedule.simulate import StepCosts, simulate
from lightning_entrain.schedule.template import find_template
from lightning_entrain.schedule.types import Placement, RowCounts
from lightning_entrain.schedule.verify import verify
from lightning_entrain.schedule.zero_bubble import Knobs, Tuned, build_zero_bubble, tune_zero_bubble
from lightning_entrain.workload.datasets import sample_sizes
from lightning_entrain.workload.flops import layer_flops, sample_flops
from lightning_entrain.workload.hf_config import model_shape

MODELS = Path(__file__).parents[1] / "conf" / "planning" / "model"
DATASETS = ("synthchartnet", "chartqa", "cocoqa", "llava150k")
NUM_REPLICAS, NUM_RANKS, GLOBAL_BATCH, CAP = 4, 8, 512, 9.0


def even_rows(num):
    every = range(num)
    return RowCounts(encoder=(4,) * num, segments={(k, k): 1 for k in every}, llm=(4,) * num)


def timed(function, repeats=5):
    """Least processor time in ms, and the result."""
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        result = function()
        best = min(best, time.process_time() - start)
    return 1e3 * best, result


def speed():
    for num_stages, num in ((8, 32), (16, 64)):
        placement = Placement.one_per_rank(num_stages // 2, num_stages // 2)
        rows = even_rows(num)
        columns = (8,) * (num_stages - 1)
        rng = np.random.default_rng(0)
        loads = 1 + 0.05 * rng.standard_normal((2, num))
        costs = StepCosts.from_loads(placement, *loads, [2 / num_stages] * num_stages)
        print(f"{num_stages} stages, {num} microbatches, ms")
        ms, plain = timed(lambda p=placement, r=rows: build_1f1b(p, r))
        print(f"  build 1F1B              {ms:9.2f}")
        ms, program = timed(
            lambda s=plain, r=rows, c=columns: lower(s, r, boundary_columns=c, dtype="x")
        )
        print(f"  lower                   {ms:9.2f}")
        ms, _ = timed(lambda p=program, r=rows: verify(p, r))
        print(f"  verify                  {ms:9.2f}")
        ms, zero = timed(lambda p=placement, r=rows, c=costs: build_zero_bubble(p, r, c))
        print(f"  build zero bubble       {ms:9.2f}")
        ms, _ = timed(
            lambda p=placement, r=rows, c=costs: tune_zero_bubble(
                p, r, c, max_bytes=9, num_steps=1000
            )
        )
        print(f"  tune zero bubble (1000) {ms:9.2f}")
        ms, _ = timed(lambda s=zero, c=costs, r=rows: simulate(s, c, r).timeline)
        print(f"  simulate + timeline     {ms:9.2f}")
        num_replicas = 4 if num_stages == 8 else 128
        ms, _ = timed(
            lambda s=zero, c=costs, r=rows, n=num_replicas: [simulate(s, c, r) for _ in range(n)], 2
        )
        print(f"  simulate {num_replicas:3d} replicas   {ms:9.2f}")
    planning()


def planning():
    """A step of `joint` on one plan: assignment of all replicas, schedule of one."""
    pair = Pair("synthchartnet", "qwen2_5vision_llama3_1b", 1)
    for name in ("groups", "shared_boundary", "v_shaped"):
        plan = getattr(pair, name)()
        start = time.process_time()
        template = template_of(pair, plan)
        seconds = time.process_time() - start
        options = {**JOINT, "ramp": template.profile, "num_microbatches": 32}
        ms, assignment = timed(
            lambda o=options: assign_samples(
                pair.encoder, pair.llm, **{"num_replicas": NUM_REPLICAS} | o
            )
        )
        print(f"planning a step, {name}: template once {seconds:.1f} s, assignment {ms:.1f} ms")
        rows, costs = replica_step(assignment, 0, *plan[:2])
        for steps in (100, 300, 1000):
            ms, found = timed(
                lambda p=plan, r=rows, c=costs, t=template, n=steps: choose_schedule(
                    p[0], r, c, max_bytes=CAP, template=t, profile=t.profile, num_steps=n
                )
            )
            ratio = found.simulation.iteration_ms / found.simulation.bottleneck_ms
            print(f"  schedule, {steps:4d} orders {ms:9.2f} ms, iteration / bottleneck {ratio:.4f}")


def block_flops(module, table):
    """Forward operations of each block; prologue and epilogue belong to the first and last."""
    load = module.load(table).sum()
    return [
        float(sum(layer_flops(layer, load)[0] for layer in module.stage_layers(b, b + 1)))
        for b in range(module.num_layers)
    ]


class Pair:
    """One dataset and model: costs of its samples, and plans."""

    def __init__(self, data, model_name, num_batches):
        model = model_shape(yaml.safe_load((MODELS / f"{model_name}.yaml").read_text()))
        table = sample_sizes(data, GLOBAL_BATCH * num_batches, seed=0)
        encoder, llm = sample_flops(model, table)
        # A mean microbatch of 4 samples takes 1 on the whole model.
        scale = len(encoder) / (encoder.sum() + llm.sum()) / 4
        self.name = f"{data} {model_name[-2:]}"
        self.encoder, self.llm = encoder * scale, llm * scale
        self.num_batches = num_batches
        self.blocks = [block_flops(module, table) for module in model.modules]
        self.whole = sum(map(sum, self.blocks))

    def groups(self):
        """One module per rank, least bottleneck."""
        plans = []
        for num_encoder in range(1, NUM_RANKS):
            counts = num_encoder, NUM_RANKS - num_encoder
            placement = Placement.one_per_rank(*counts)
            plans.append(self._plan(placement, self._parts(counts)))
        return min(plans, key=lambda p: max(p[2]))

    def shared_boundary(self):
        """All layers in a row, cut into ranks; one may hold layers of both modules."""
        row = self.blocks[0] + self.blocks[1]
        middle = len(self.blocks[0])
        ranges = partition_layers(row, NUM_RANKS)
        encoder = [(a, min(b, middle), r) for r, (a, b) in enumerate(ranges) if a < middle]
        llm = [(max(a, middle), b, r) for r, (a, b) in enumerate(ranges) if b > middle]
        placement = Placement(
            num_encoder_stages=len(encoder),
            num_llm_stages=len(llm),
            stage_to_rank=tuple(r for _, _, r in encoder + llm),
        )
        return self._plan(placement, [[sum(row[a:b]) for a, b, _ in own] for own in (encoder, llm)])

    def v_shaped(self):
        """Two chunks per rank: the split between modules and cuts with the least bottleneck."""
        plans = []
        for num_encoder in range(4, 2 * NUM_RANKS - 3):
            counts = num_encoder, 2 * NUM_RANKS - num_encoder
            if all(n <= len(own) for n, own in zip(counts, self.blocks, strict=True)):
                placement = Placement.v_shaped(*counts)
                plans.append(self._plan(placement, self._balanced_chunks(placement)))
        return min(plans, key=lambda p: max(p[2]))

    def _balanced_chunks(self, placement):
        """Move layers between neighbouring chunks while the ranks' loads even out."""
        counts = placement.num_encoder_stages, placement.num_llm_stages
        cuts = [
            [stop for _, stop in partition_layers(own, n)][:-1]
            for own, n in zip(self.blocks, counts, strict=True)
        ]

        def parts():
            return [
                [sum(own[a:b]) for a, b in itertools.pairwise([0, *cut, len(own)])]
                for own, cut in zip(self.blocks, cuts, strict=True)
            ]

        def score():
            loads = sorted(self._plan(placement, parts())[2], reverse=True)
            # Even ranks first; even chunks keep a list schedule from stumbling.
            chunks = [c / self.whole for part in parts() for c in part]
            return loads[0] + 0.1 * sum(c * c for c in chunks)

        rng = np.random.default_rng(0)
        best = score()
        for _ in range(6000):
            kept = [list(cut) for cut in cuts]
            for _ in range(rng.integers(1, 4)):
                cut = cuts[rng.integers(2)]
                if cut:
                    cut[rng.integers(len(cut))] += rng.choice([-1, 1])
            legal = all(
                all(a < b for a, b in itertools.pairwise([0, *cut, len(own)]))
                for cut, own in zip(cuts, self.blocks, strict=True)
            )
            found = score() if legal else np.inf
            if found <= best:
                best = found
            else:
                cuts = kept
        return parts()

    def _parts(self, counts):
        return [
            stage_costs(own, partition_layers(own, n))
            for own, n in zip(self.blocks, counts, strict=True)
        ]

    def _plan(self, placement, parts):
        """(placement, share of its module per stage, share of the model per rank)."""
        shares = [c / sum(own) for part, own in zip(parts, self.blocks, strict=True) for c in part]
        of_model = [c / self.whole for part in parts for c in part]
        ranks = [0.0] * placement.num_ranks
        for stage, rank in enumerate(placement.stage_to_rank):
            ranks[rank] += of_model[stage]
        return placement, shares, ranks

    def times(self, plan, make, *, overhead=0.0, noise=0.0, factors=(1.0, 1.0), **options):
        """Iterations of the slowest replica, and the busiest rank's work, per batch."""
        placement, shares, _ = plan
        found = []
        for b in range(self.num_batches):
            part = slice(b * GLOBAL_BATCH, (b + 1) * GLOBAL_BATCH)
            encoder, llm = self.encoder[part], self.llm[part]
            assignment = assign_samples(
                encoder, llm, **{"num_replicas": NUM_REPLICAS, "num_microbatches": 32} | options
            )
            slowest = 0.0
            for replica in range(NUM_REPLICAS):
                rows, costs = replica_step(
                    assignment,
                    replica,
                    placement,
                    shares,
                    input_factor=factors[0],
                    weight_factor=factors[1],
                    overhead_ms=overhead,
                )
                tuned = make(placement, rows, costs)
                costs, rows = tuned.reorder_costs(costs), tuned.reorder_rows(rows)
                costs = noisy(costs, noise, np.random.default_rng(b * NUM_REPLICAS + replica))
                slowest = max(slowest, simulate(tuned.schedule, costs, rows).iteration_ms)
            ranks = [0.0] * placement.num_ranks
            totals = encoder.sum(), llm.sum()
            for stage, rank in enumerate(placement.stage_to_rank):
                total = totals[stage >= placement.num_encoder_stages]
                ranks[rank] += 3 * shares[stage] * total / NUM_REPLICAS
            found.append((slowest, max(ranks), sum(ranks) / len(ranks)))
        return np.array(found)

    def ratio(self, plan, make, *, over="bottleneck", **options):
        """Mean iteration / bottleneck (or / ideal)."""
        times = self.times(plan, make, **options)
        return float((times[:, 0] / times[:, 1 if over == "bottleneck" else 2]).mean())


def noisy(costs, noise, rng):
    """Durations that differ from what the order was made for."""
    if not noise:
        return costs
    tables = {
        name: getattr(costs, name)
        * np.maximum(1 + noise * rng.standard_normal(costs.forward_ms.shape), 0)
        for name in ("forward_ms", "input_ms", "weight_ms")
    }
    return dataclasses.replace(costs, **tables)


def choice(**options):
    options = {"max_bytes": CAP} | options
    return lambda placement, rows, costs: choose_schedule(placement, rows, costs, **options).tuned


def one_f_one_b(placement, rows, costs):
    return eager_1f1b(placement, rows, costs, False, False)


JOINT = {"policy": "joint", "max_lag": 0, "limit_by_heaviest": False}


def template_of(pair, plan, num=32, *, ramp=True, steps=200_000, **options):
    """The order that suits a plan, and its ramp."""
    placement, shares, _ = plan
    modules = [sum(own) / pair.whole for own in pair.blocks]
    forward = [
        share * modules[s >= placement.num_encoder_stages] * 32 / num
        for s, share in enumerate(shares)
    ]
    return find_template(
        placement, [forward] * 3, num, max_live=CAP, ramp=ramp, num_steps=steps, **options
    )


def of_template(pair, plan, num=32, **options):
    """Make and assignment options for that order."""
    template = template_of(pair, plan, num, **options)
    assign = {**JOINT, "num_microbatches": num}
    if not template.is_ramp:
        return choice(template=template), assign
    make = choice(template=template, profile=template.profile)
    return make, {**assign, "ramp": template.profile}


def pairs(num_batches):
    for model in ("qwen2_5vision_llama3_1b", "qwen2_5vision_llama3_3b"):
        for data in DATASETS:
            yield Pair(data, model, num_batches)


def table(num_batches, columns):
    """Print columns(pair) -> {name: ratio} for each pair, then mean and worst."""
    found = []
    for pair in pairs(num_batches):
        row = columns(pair)
        if not found:
            print(f"{'pair':18s}", *(f"{name:>14s}" for name in row))
        print(f"{pair.name:18s}", *(f"{value:14.4f}" for value in row.values()), flush=True)
        found.append(list(row.values()))
    print(f"{'mean':18s}", *(f"{value:14.4f}" for value in np.mean(found, axis=0)))
    print(f"{'worst':18s}", *(f"{value:14.4f}" for value in np.max(found, axis=0)))


def gaps(pair):
    plan = pair.groups()
    flat, even = of_template(pair, plan, ramp=False)
    make, options = of_template(pair, plan)
    return {
        "bottl./ideal": max(plan[2]) * NUM_RANKS,
        "fixed 1F1B": pair.ratio(plan, one_f_one_b, policy="fixed"),
        "entrain 1F1B": pair.ratio(plan, one_f_one_b, policy="entrain"),
        "joint best": pair.ratio(plan, flat, **even),
        "with ramp": pair.ratio(plan, make, **options),
    }


def variants(pair):
    plan = pair.groups()
    overhead = 0.02 / NUM_RANKS
    by_k = []
    for num in (24, 32, 40):
        make, options = of_template(pair, plan, num, overhead_ms=overhead)
        by_k.append(pair.ratio(plan, make, overhead=overhead, **options))
    caps = tuple(float(NUM_RANKS - r + 1) for r in range(NUM_RANKS))
    make, options = of_template(pair, plan)
    uneven = {"factors": (1.15, 0.85)}
    return {
        "2% overhead": min(by_k),
        "cap S-s+1": pair.ratio(plan, choice(max_bytes=caps), **JOINT),
        "I1.15 W.85": pair.ratio(plan, choice(), **JOINT, **uneven),
        "ramp I1.15": pair.ratio(plan, make, **options, **uneven),
        "noise 2%": pair.ratio(plan, choice(), noise=0.02, **JOINT),
        "noise 5%": pair.ratio(plan, choice(), noise=0.05, **JOINT),
        "ramp noise 2%": pair.ratio(plan, make, noise=0.02, **options),
        "ramp noise 5%": pair.ratio(plan, make, noise=0.05, **options),
    }


def placements(pair):
    row = {}
    for name in ("groups", "shared_boundary", "v_shaped"):
        plan = getattr(pair, name)()
        row[f"{name[:6]} b/ideal"] = max(plan[2]) * NUM_RANKS
        steps = 400_000 if name == "v_shaped" else 200_000
        make, options = of_template(pair, plan, steps=steps)
        row[f"{name[:6]} ramp"] = pair.ratio(plan, make, over="ideal", **options)
    return row


def deferral(pair):
    """Joint and Entrain's assignment; everything within the memory of 9 microbatches."""
    plan = pair.groups()
    row = {}
    for policy, lag in (("joint", 0), ("joint", 1), ("entrain", 1)):
        options = {"policy": policy, "max_lag": lag, "limit_by_heaviest": False}
        for name, split, eager in (
            ("plain", 0, 0),
            ("split", 1, 0),
            ("eager", 0, 1),
            ("both", 1, 1),
        ):
            if lag == 0 and split:
                continue

            def make(placement, rows, costs, split=split, eager=eager):
                return eager_1f1b(placement, rows, costs, split, eager)

            row[f"{policy[:5]}{lag} {name}"] = pair.ratio(plan, make, **options)
        row[f"{policy[:5]}{lag} zb"] = pair.ratio(plan, choice(families=["zero_bubble"]), **options)
    return row


def eager_1f1b(placement, rows, costs, split, eager):
    """1F1B, or the best of eager forward, with the memory of 1F1B plus one."""
    best = None
    for extra in range(1, 5) if eager else (0,):
        caps = [NUM_RANKS - s for s in range(NUM_RANKS)]
        for stage in range(placement.num_encoder_stages):
            caps[stage] = min(caps[stage] + extra, NUM_RANKS + 1) if eager else caps[stage]
        schedule = build_1f1b(placement, rows, split_backward=bool(split), caps=caps)
        found = simulate(schedule, costs, rows)
        if best is None or found.iteration_ms < best.iteration_ms:
            best = found
    order = tuple(range(rows.num_microbatches))
    return Tuned(schedule=best.schedule, order=order, knobs=Knobs.zb_h1(NUM_RANKS))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    tables = {"gaps": gaps, "variants": variants, "placements": placements, "deferral": deferral}
    parser.add_argument("what", choices=["speed", *tables])
    parser.add_argument("--num-batches", type=int, default=8)
    options = parser.parse_args()
    if options.what == "speed":
        speed()
    else:
        table(options.num_batches, tables[options.what])


if __name__ == "__main__":
    main()
