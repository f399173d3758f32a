"""How even the policies make microbatches, how far from the bounds, and how long they take.

    python benchmarks/assignment.py                     # print everything
    python benchmarks/assignment.py --seeds 3 evenness  # one part, fewer batches
    python benchmarks/assignment.py --write             # and update docs/benchmarks.md and its JSON

Parts: ``evenness`` (all policies on the sizes of four datasets, 1b and 3b models), ``peer`` (one
module alone against the number-partitioning library prtpy, which must be installed), ``speed``.
Setting of the first two: global batch 512, 4 replicas, costs by FLOPs. Times are processor time of
one core, so that other programs on a busy machine count little.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import yaml

from lightning_entrain.assign import Assignment, assign_samples, imbalance
from lightning_entrain.workload.datasets import sample_sizes
from lightning_entrain.workload.flops import sample_flops
from lightning_entrain.workload.hf_config import model_shape

ROOT = Path(__file__).parents[1]
DATASETS = ("synthchartnet", "chartqa", "cocoqa", "llava150k")
MODELS = {"1b": "qwen2_5vision_llama3_1b", "3b": "qwen2_5vision_llama3_3b"}
GLOBAL_BATCH, NUM_REPLICAS, NUM_MICROBATCHES = 512, 4, 32
VARIANTS: dict[str, dict[str, Any]] = {
    "fixed": {"policy": "fixed"},
    "disttrain": {"policy": "disttrain"},
    "dip": {"policy": "dip"},
    "entrain": {"policy": "entrain"},
    "joint": {"policy": "joint"},
    "joint, no lag": {"policy": "joint", "max_lag": 0},
    "joint, K 24-40": {"policy": "joint", "num_microbatches": (24, 40)},
}
Pair = tuple[np.ndarray, np.ndarray]


def costs(model: str, dataset: str, num_samples: int, seed: int) -> Pair:
    config = yaml.safe_load((ROOT / "conf/planning/model" / f"{MODELS[model]}.yaml").read_text())
    return sample_flops(model_shape(config, name=model), sample_sizes(dataset, num_samples, seed))


def mean_over_replicas(found: Assignment, module: str, measure: str) -> float:
    replicas = range(len(found.replicas))
    return statistics.fmean(getattr(found.imbalance(module, r), measure) for r in replicas)


def measures(found: Assignment) -> dict[str, float]:
    """Of one batch: mean over its replicas, and the spread across them."""
    record = {}
    for module in ("encoder", "llm"):
        bounds = getattr(found.bounds, module)
        record |= {
            f"{module}_cv": mean_over_replicas(found, module, "cv"),
            f"{module}_max_over_mean": mean_over_replicas(found, module, "max_over_mean"),
            f"{module}_max_bound": statistics.fmean(b.max_load / b.mean for b in bounds),
            f"{module}_cv_bound": statistics.fmean(b.cv for b in bounds),
            f"{module}_replica_max_over_mean": found.replica_imbalance(module).max_over_mean,
        }
    record["num_microbatches"] = statistics.fmean(r.num_microbatches for r in found.replicas)
    if found.replicas[0].groups is not None:
        record["group_cv"] = group_cv(found)
    return record


def group_cv(found: Assignment) -> float:
    """Coefficient of variation of the encoder loads of sub-microbatches, mean over replicas."""
    assert found.encoder_cost is not None
    return statistics.fmean(
        imbalance(
            [
                math.fsum(found.encoder_cost[i] for i in group)
                for entry in replica.groups or ()
                for group in entry
            ]
        ).cv
        for replica in found.replicas
    )


def evenness(num_seeds: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for model in MODELS:
        for dataset in DATASETS:
            batches = [costs(model, dataset, GLOBAL_BATCH, seed) for seed in range(num_seeds)]
            for name, arguments in VARIANTS.items():
                options = {"num_microbatches": NUM_MICROBATCHES, **arguments}
                rows = [
                    measures(assign_samples(*batch, num_replicas=NUM_REPLICAS, **options))
                    for batch in batches
                ]
                mean = {key: statistics.fmean(row[key] for row in rows) for key in rows[0]}
                results.setdefault(model, {}).setdefault(dataset, {})[name] = mean
                print(
                    f"{model} {dataset:14} {name:15} "
                    f"CV {100 * mean['encoder_cv']:.2f} / {100 * mean['llm_cv']:.2f} %",
                    flush=True,
                )
    return results


def peer(num_seeds: int) -> dict[str, Any]:
    """LLM costs alone, 128 samples into 32 microbatches: ``joint`` against prtpy's algorithms."""
    import prtpy

    algorithms = {
        "prtpy lpt": prtpy.partitioning.lpt,
        "prtpy multifit": prtpy.partitioning.multifit,
        "prtpy karmarkar_karp": prtpy.partitioning.kk,
    }
    num_samples = GLOBAL_BATCH // NUM_REPLICAS
    results: dict[str, Any] = {}
    for dataset in DATASETS:
        batches = [costs("1b", dataset, num_samples, seed)[1] for seed in range(num_seeds)]
        rows: dict[str, list[tuple[float, float, float]]] = {}
        for llm in batches:
            for name, algorithm in algorithms.items():
                start = time.process_time()
                sums = prtpy.partition(
                    algorithm=algorithm,
                    numbins=NUM_MICROBATCHES,
                    items=llm.tolist(),
                    outputtype=prtpy.out.Sums,
                )
                rows.setdefault(name, []).append(_row([float(x) for x in sums], start))
            start = time.process_time()
            found = assign_samples(
                np.zeros_like(llm), llm, num_replicas=1, num_microbatches=NUM_MICROBATCHES
            )
            rows.setdefault("joint", []).append(_row(found.llm_loads(0).tolist(), start))
        for name, values in rows.items():
            cv, largest, ms = (statistics.fmean(column) for column in zip(*values, strict=True))
            results.setdefault(dataset, {})[name] = {"cv": cv, "max_over_mean": largest, "ms": ms}
            print(f"{dataset:14} {name:21} CV {100 * cv:.3f} % max/mean {largest:.4f} {ms:.1f} ms")
    return results


def _row(sums: list[float], start: float) -> tuple[float, float, float]:
    elapsed = 1e3 * (time.process_time() - start)
    return imbalance(sums).cv, imbalance(sums).max_over_mean, elapsed


def speed(num_repeats: int) -> list[dict[str, float]]:
    """``joint`` with compiled code warm: one replica, then batches of 512 samples per replica."""
    sizes = [(128, 1, 32), (512, 4, 32), (2048, 4, 128), (8192, 16, 128), (8192, 64, 32)]
    sizes += [(65_536, 128, 128)]
    results = []
    for num_samples, num_replicas, num_microbatches in sizes:
        batch = costs("1b", "llava150k", num_samples, 0)
        times = []
        for _ in range(num_repeats if num_samples < 10_000 else 3):
            start = time.process_time()
            assign_samples(*batch, num_replicas=num_replicas, num_microbatches=num_microbatches)
            times.append(1e3 * (time.process_time() - start))
        row = {
            "num_samples": num_samples,
            "num_replicas": num_replicas,
            "num_microbatches": num_microbatches,
            "median_ms": statistics.median(times),
            "least_ms": min(times),
        }
        results.append(row)
        print(row, flush=True)
    return results


def markdown(report: dict[str, Any]) -> str:
    """The tables of docs/benchmarks.md."""
    lines: list[str] = []
    for model, datasets in report.get("evenness", {}).items():
        lines += _evenness_tables(model, datasets)
    if "peer" in report:
        lines += ["One module alone (LLM costs of 128 samples, 32 microbatches): CV %, ms", ""]
        names = list(report["peer"][DATASETS[0]])
        lines += ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
        for dataset, row in report["peer"].items():
            cells = [f"{100 * row[name]['cv']:.3f}, {row[name]['ms']:.1f}" for name in names]
            lines.append(f"| {dataset} | " + " | ".join(cells) + " |")
        lines.append("")
    if "speed" in report:
        lines += ["Time of `joint`, processor time of one core, compiled code warm:", ""]
        lines += ["| samples | replicas | K | median ms | least ms |", "|---|---|---|---|---|"]
        for row in report["speed"]:
            cells = [f"{row[key]:,.0f}" for key in row]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def _evenness_tables(model: str, datasets: dict[str, Any]) -> list[str]:
    heading = "| | " + " | ".join(datasets) + " |"
    rule = "|---" * (len(datasets) + 1) + "|"
    lines = [f"{model} model: coefficient of variation of loads in %, encoder / LLM", ""]
    lines += [heading, rule]
    for name in VARIANTS:
        cells = [
            f"{100 * d[name]['encoder_cv']:.2f} / {100 * d[name]['llm_cv']:.2f}"
            for d in datasets.values()
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    for name, against in (
        ("joint", "disttrain"),
        ("joint", "entrain"),
        ("joint, K 24-40", "disttrain"),
    ):
        cells = [
            " / ".join(
                f"{d[against][f'{m}_cv'] / d[name][f'{m}_cv']:.1f}x" for m in ("encoder", "llm")
            )
            for d in datasets.values()
        ]
        lines.append(f"| {against} : {name} | " + " | ".join(cells) + " |")
    lines += ["", f"{model} model: heaviest microbatch / mean, encoder / LLM", "", heading, rule]
    for name in ("disttrain", "entrain", "joint", "joint, K 24-40"):
        cells = [_maxima(d[name], "max_over_mean") for d in datasets.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
        if name.startswith("joint"):
            cells = [_maxima(d[name], "max_bound") for d in datasets.values()]
            lines.append(f"| lower bound, {name} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def _maxima(row: dict[str, float], measure: str) -> str:
    return f"{row[f'encoder_{measure}']:.3f} / {row[f'llm_{measure}']:.3f}"


def write(report: dict[str, Any]) -> None:
    """Replace the tables between the markers of docs/benchmarks.md, and the JSON beside it."""
    page = ROOT / "docs" / "benchmarks.md"
    begin, end = "<!-- assignment tables: begin -->\n", "<!-- assignment tables: end -->"
    before, _, rest = page.read_text().partition(begin)
    _, _, after = rest.partition(end)
    page.write_text(f"{before}{begin}\n{markdown(report)}\n{end}{after}")
    text = json.dumps(report, indent=1, sort_keys=True)
    (ROOT / "docs" / "benchmarks_assignment.json").write_text(text + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help="evenness, peer, speed; all by default")
    parser.add_argument("--seeds", type=int, default=20, help="batches per mean")
    parser.add_argument("--repeats", type=int, default=15, help="of each timing")
    parser.add_argument("--write", action="store_true", help="update docs/benchmarks.md")
    arguments = parser.parse_args()
    parts = arguments.parts or ["evenness", "peer", "speed"]
    batch = costs("1b", "cocoqa", 64, 0)
    assign_samples(*batch, num_replicas=2, num_microbatches=8)  # Compiles, or loads the cache.
    report: dict[str, Any] = {"machine": platform.processor() or platform.machine()}
    for part in parts:
        if part == "evenness":
            report[part] = evenness(arguments.seeds)
        elif part == "peer":
            report[part] = peer(arguments.seeds)
        elif part == "speed":
            report[part] = speed(arguments.repeats)
        else:
            parser.error(f"{part} is no part; there are evenness, peer and speed")
    report["seeds"] = arguments.seeds
    if arguments.write:
        write(report)
    else:
        print(markdown(report))


if __name__ == "__main__":
    main()
