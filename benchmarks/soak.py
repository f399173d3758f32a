"""Trains for many steps and watches what a leak would grow: memory, file descriptors, threads.

Run `python -m benchmarks.soak` (500 steps, 2 processes), or with other numbers: `--steps 2000`.
Exits with 1 where a process grew by more than the limits between a fifth of the run and its end.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_GROWTH_MIB = 8.0
"""Allocator caches and pools fill slowly; a leaked tensor per step would be more."""


@dataclass(frozen=True)
class Usage:
    """What one process holds.

    Attributes:
        step: Optimizer steps done.
        memory_mib: Resident memory that is not backed by files.
        num_descriptors: Open file descriptors.
        num_threads: Threads.
        num_tensors: Tensors that Python can reach.
    """

    step: int
    memory_mib: float
    num_descriptors: int
    num_threads: int
    num_tensors: int

    @classmethod
    def now(cls, step: int) -> Usage:
        """Read this process's entries in /proc."""
        import torch

        gc.collect()
        status = dict(
            line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines()
        )
        return cls(
            step=step,
            memory_mib=int(status["RssAnon"].split()[0]) / 1024,
            num_descriptors=len(os.listdir("/proc/self/fd")),
            num_threads=int(status["Threads"]),
            num_tensors=sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()),
        )


def soak(num_steps: int, schedule: str, root: Path) -> list[Usage]:
    """Train on this rank and note the usage twenty times."""
    import lightning.pytorch as pl

    from lightning_entrain.strategy import EntrainStrategy
    from tests.distributed.job import Job

    class Meter(pl.Callback):
        """Notes the usage every twentieth of the run."""

        def __init__(self) -> None:
            self.usages: list[Usage] = []

        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.global_step % max(num_steps // 20, 1) == 0:
                self.usages.append(Usage.now(trainer.global_step))

    meter = Meter()
    job = Job(
        num_batches=20,
        batch_size=12,
        num_microbatches=4,
        policy="entrain",
        text_only=0.2,
        trainer={"max_steps": num_steps, "max_epochs": -1, "callbacks": [meter]},
    )
    module = job.module()
    trainer = job.make_trainer(EntrainStrategy(schedule=schedule), 2, root)
    loader = job.loader(trainer, module)
    trainer.fit(module, loader, loader)
    return meter.usages


def main() -> int:
    """Run the soak test and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--schedule", default="zero_bubble")
    options = parser.parse_args()

    from tests.distributed.ranks import run_ranks

    grown = False
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as root:
        ranks = run_ranks(
            2, soak, options.steps, options.schedule, Path(root), timeout=2.0 * options.steps
        )
    print(f"{options.steps} steps, {options.schedule}: {time.monotonic() - begin:.0f} s")
    print("rank  step  memory MiB  descriptors  threads  tensors")
    for rank, usages in enumerate(ranks):
        settled, last = usages[len(usages) // 5], usages[-1]
        for usage in [*usages[:: max(len(usages) // 5, 1)], last]:
            print(
                f"{rank:4d} {usage.step:5d} {usage.memory_mib:11.1f} {usage.num_descriptors:12d} "
                f"{usage.num_threads:8d} {usage.num_tensors:8d}"
            )
        grown |= last.memory_mib - settled.memory_mib > MAX_GROWTH_MIB
        grown |= last.num_descriptors > settled.num_descriptors
        grown |= last.num_threads > settled.num_threads
        grown |= last.num_tensors > settled.num_tensors
    print("grew" if grown else "no growth")
    return int(grown)


if __name__ == "__main__":
    sys.exit(main())
