"""What the monitors cost: seconds spent in their hooks over seconds of training.

    python benchmarks/observe.py               # one process without a pipeline
    python benchmarks/observe.py --devices 2   # one encoder and one LLM process
    python benchmarks/observe.py --steps 200 --layers 8 --hidden 512

Every hook of every monitor is timed on rank 0, in two fits on synthetic samples: with values logged
at every step (log_every_n_steps=1), and with the trainer's default of 50, where ThroughputMonitor
logs rarely. The others keep their own intervals; WorkloadVariabilityMonitor logs every step
in both. The CSV logger is part of it. The first two steps are left out. Times after the last step
(report, comparison of policies) are given apart: they are no part of a step. Processor time leaves
out what the process waited for, such as other ranks.
"""

import argparse
import os
import tempfile
import time
import warnings
from collections import defaultdict

os.environ.setdefault("OMP_NUM_THREADS", "1")

import lightning.pytorch as pl

from lightning_entrain.callbacks.batch_size import BatchSizeAdvisor
from lightning_entrain.callbacks.drift import CostModelDriftMonitor
from lightning_entrain.callbacks.memory import MemoryMonitor
from lightning_entrain.callbacks.report import RunReport
from lightning_entrain.callbacks.throughput import ThroughputMonitor
from lightning_entrain.callbacks.timeline import PipelineTimelineMonitor
from lightning_entrain.callbacks.variability import WorkloadVariabilityMonitor
from lightning_entrain.data.synthetic import SyntheticSource
from lightning_entrain.datamodule import EntrainDataModule
from lightning_entrain.loggers import StepCSVLogger
from lightning_entrain.models.tiny import tiny_vlm
from lightning_entrain.module import EntrainLightningModule
from lightning_entrain.strategy import EntrainStrategy

IN_STEP = ("on_train_batch_start", "on_train_batch_end")
AFTER = ("on_train_end", "on_fit_end")
SKIPPED = 2


class Clock:
    """Time per callback, inside steps and after the last."""

    def __init__(self):
        self.in_steps, self.after = defaultdict(float), defaultdict(float)
        self.busy = defaultdict(float)  # processor time inside steps
        self.steps = 0
        self.training_ms = 0.0

    def watch(self, callback):
        for hook, totals in [(h, self.in_steps) for h in IN_STEP] + [
            (h, self.after) for h in AFTER
        ]:
            plain = getattr(callback, hook)

            def timed(*args, plain=plain, totals=totals, **kwargs):
                begin, busy = time.perf_counter(), time.thread_time()
                plain(*args, **kwargs)
                name = type(callback).__name__
                if totals is self.after or self.steps >= SKIPPED:
                    totals[name] += (time.perf_counter() - begin) * 1e3
                if totals is self.in_steps and self.steps >= SKIPPED:
                    self.busy[name] += (time.thread_time() - busy) * 1e3

            setattr(callback, hook, timed)
        return callback


class StepTime(pl.Callback):
    """From the end of a step to the end of the next: what a user waits for."""

    def __init__(self, clock):
        self.clock, self.begin = clock, 0.0

    def on_train_batch_end(self, *args):
        now = time.perf_counter()
        if self.clock.steps >= SKIPPED:
            self.clock.training_ms += (now - self.begin) * 1e3
        self.begin = now
        self.clock.steps += 1


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--side", type=int, default=300, help="largest side of an image, pixels")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    for log_every_n_steps in (1, 50):
        measure(options, log_every_n_steps)


def measure(options, log_every_n_steps):
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        source = SyntheticSource(64, max_side=options.side)
        data = EntrainDataModule(
            source, global_batch_size=16, num_microbatches=4, cache_dir=folder, progress=False
        )
        data.prepare_data()
        tokenizer = data.tokenizer
        model = tiny_vlm(
            tokenizer.vocab_size,
            image_token_id=tokenizer.image_token_id,
            encoder_layers=options.layers,
            llm_layers=options.layers,
            llm_hidden_size=options.hidden,
            llm_intermediate_size=3 * options.hidden,
            llm_heads=8,
        )
        monitors = [
            WorkloadVariabilityMonitor(),
            PipelineTimelineMonitor(),
            ThroughputMonitor(),
            MemoryMonitor(),
            CostModelDriftMonitor(),
            BatchSizeAdvisor(),
            RunReport(show_plan=False),
        ]
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=options.devices,
            strategy="auto" if options.devices == 1 else EntrainStrategy(),
            max_steps=options.steps,
            logger=StepCSVLogger(folder),
            log_every_n_steps=log_every_n_steps,
            callbacks=[*(clock.watch(monitor) for monitor in monitors), StepTime(clock)],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
            use_distributed_sampler=False,
            default_root_dir=folder,
        )
        trainer.fit(EntrainLightningModule(model), datamodule=data)
    if not trainer.is_global_zero:
        return
    count = clock.steps - SKIPPED
    print(f"log_every_n_steps={log_every_n_steps}, ", end="")
    print(f"{options.devices} process(es), {clock.training_ms / count:.1f} ms per step")
    print("| monitor | ms per step | processor ms | share of a step | ms after the last step |")
    print("|---|---|---|---|---|")
    for name in [type(monitor).__name__ for monitor in monitors] + ["all"]:
        spent, busy, after = (
            sum(totals.values()) if name == "all" else totals[name]
            for totals in (clock.in_steps, clock.busy, clock.after)
        )
        share, each = spent / clock.training_ms, f"{spent / count:.3f} | {busy / count:.3f}"
        print(f"| {name} | {each} | {share:.2%} | {after:.0f} |")


if __name__ == "__main__":
    main()
