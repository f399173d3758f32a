"""How long planning takes, and what it plans for the paper's setting.

    python benchmarks/plan.py [--search-only]

Prints the time of the layer partition and of whole searches up to 1,024 GPUs, then the paper's
tables: splits of 16 GPUs per profiling batch, b_min and stages per dataset and model.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from hydra import compose, initialize_config_dir

from lightning_entrain.conf_path import conf_dir
from lightning_entrain.plan.partition import partition_layers
from lightning_entrain.plan.planner import PlanReport
from lightning_entrain.plan_app import make_report, register_configs

DATASETS = ("synthchartnet", "llava150k", "chartqa", "cocoqa")


def plan(*overrides: str) -> tuple[PlanReport, float]:
    """A report and the seconds it took."""
    with initialize_config_dir(str(conf_dir() / "planning"), version_base="1.3"):
        config = compose("plan", overrides=list(overrides))
    start = time.perf_counter()
    report = make_report(config)
    return report, time.perf_counter() - start


def time_partition() -> None:
    """200 layers into 32 stages."""
    costs = np.random.default_rng(0).random(200)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        partition_layers(costs, 32)
        times.append(time.perf_counter() - start)
    print(f"partition of 200 layers into 32 stages: {1e3 * np.median(times):.1f} ms (limit 50 ms)")


def time_searches() -> None:
    """Whole searches, data and b_min included."""
    for model, cluster, gpus in (
        ("qwen2_5vision_llama3_1b", "h100_8", 8),
        ("qwen2_5_vl_7b", "h100_64", 64),
        ("qwen2_5vision_llama3_1b", "h100_1024", 1024),
        ("qwen2_5_vl_72b", "h100_1024", 1024),
    ):
        report, seconds = plan(f"model={model}", f"cluster={cluster}", "global_batch_size=4096")
        print(
            f"{model} on {gpus} GPUs: {seconds:.2f} s, {report.result.num_candidates:,} topologies "
            f"(limit 10 s)"
        )


def print_paper_tables() -> None:
    """Splits, b_min, stages in the paper's setting."""
    for size in ("1b", "3b"):
        for data in DATASETS:
            report, _ = plan(f"model=qwen2_5vision_llama3_{size}", f"data={data}", "cluster=paper")
            found = report.profile.b_min
            splits = "; ".join(
                f"{batch}: {', '.join(names)}"
                for batch, names in report.profile.split_names.items()
            )
            best = report.plan
            print(
                f"{size} {data}: share {16 * found.proportions[0]:.2f} of 16, b_min {found.b_min}"
                f"{'' if found.stable else ' (not stable)'}, stages {best.encoder_stages}:"
                f"{best.llm_stages}, {best.iteration_ms:,.0f} ms; {splits}"
            )
            for other in report.result.plans[1:3]:
                print(
                    f"    then {other.encoder_stages}:{other.llm_stages} {other.iteration_ms:,.0f}"
                )


def main() -> None:
    """Run all of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--search-only", action="store_true")
    arguments = parser.parse_args()
    register_configs()
    time_partition()
    time_searches()
    if not arguments.search_only:
        print_paper_tables()


if __name__ == "__main__":
    main()
