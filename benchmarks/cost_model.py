"""How well the measured cost model predicts packed microbatches it has not seen.

Profiles the tiny model on this CPU, then times whole modules, forward and backward, on packed
microbatches of random sizes and compares. Prints one line per module and the overall median error.

    python benchmarks/cost_model.py [--threads 1] [--microbatches 12] [--seconds 0.5] [--cpu-time]

With --cpu-time processor time is measured instead of time on the clock, so that other programs on
a busy machine do not count; use one thread with it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
import torch
import yaml
from torch.nn import functional as F

from lightning_entrain.conf_path import conf_dir
from lightning_entrain.models.protocol import EncoderPacking, LlmPacking
from lightning_entrain.models.tiny import tiny_vlm
from lightning_entrain.profiling import Clock, profile_model, time_call
from lightning_entrain.workload.costs import module_cost
from lightning_entrain.workload.hf_config import model_shape
from lightning_entrain.workload.measured import MeasuredCostModel
from lightning_entrain.workload.memory import Training
from lightning_entrain.workload.sizes import SampleSize
from lightning_entrain.workload.tables import SizeTable


def random_samples(generator: np.random.Generator, count: int) -> list[SampleSize]:
    """Samples with one image of 4-40 patches a side and 10-600 text tokens."""
    return [
        SampleSize(grids=((1, 2 * int(a), 2 * int(b)),), num_text_tokens=int(c), num_label_tokens=1)
        for a, b, c in zip(
            generator.integers(2, 21, count),
            generator.integers(2, 21, count),
            generator.integers(10, 601, count),
            strict=True,
        )
    ]


def measure(model, name: str, samples: list[SampleSize], seconds: float, clock: Clock) -> float:
    """Milliseconds of forward and backward of one module on a packed microbatch."""
    place = torch.device("cpu")
    if name == "encoder":
        packing = EncoderPacking(grids=tuple(grid for s in samples for grid in s.grids))
        pixels = torch.randn(packing.num_patches, model.encoder.patch_dim)
        layers = model.encoder.num_layers
        forward, backward = time_call(
            lambda: model.encoder_stage(pixels, packing, start=0, stop=layers),
            seconds,
            place,
            clock,
        )
    else:
        llm_packing = LlmPacking(sample_lengths=tuple(s.num_tokens for s in samples))
        ids = torch.randint(1, 1024, (llm_packing.num_tokens,))
        labels = torch.randint(1, 1024, (llm_packing.num_tokens,))
        layers = model.llm.num_layers

        def run() -> torch.Tensor:
            logits = model.llm_stage(None, llm_packing, start=0, stop=layers, input_ids=ids)
            return F.cross_entropy(logits.float(), labels, reduction="sum")

        forward, backward = time_call(run, seconds, place, clock)
    return statistics.median(forward) + statistics.median(backward)


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--microbatches", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--cpu-time", action="store_true")
    arguments = parser.parse_args()
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    path = Path(conf_dir()) / "planning" / "model" / "tiny_vlm.yaml"
    config = yaml.safe_load(path.read_text())
    shape = model_shape(config, name="tiny_vlm")
    profile = profile_model(
        config,
        name="tiny_vlm",
        sizes=(64, 256, 1024, 4096),
        seconds_per_point=arguments.seconds,
        clock=clock,
    )
    cost_model = MeasuredCostModel(profile)
    model = tiny_vlm(vocab_size=1024)
    training = Training(precision="32-true")
    generator = np.random.default_rng(7)
    errors: list[float] = []
    for module in shape.modules:
        own = []
        for _ in range(arguments.microbatches):
            samples = random_samples(generator, int(generator.integers(1, 9)))
            load = module.load(SizeTable.from_sizes(samples, window=8)).sum()
            forward, backward = module_cost(module, load, cost_model, training)
            predicted = float(forward[0] + backward[0])
            actual = measure(model, module.name, samples, arguments.seconds, clock)
            own.append(predicted / actual - 1)
            print(
                f"{module.name:8} {len(samples)} samples {int(load.rows[0]):6,} rows: predicted "
                f"{predicted:8.1f} ms, measured {actual:8.1f} ms ({100 * own[-1]:+.0f} %)"
            )
        errors += own
        print(f"{module.name}: median error {100 * statistics.median(map(abs, own)):.1f} %")
    print(f"All: median error {100 * statistics.median(map(abs, errors)):.1f} % (limit 15 %)")


if __name__ == "__main__":
    main()
