"""Kill one rank at random points of a training, and go on from the checkpoint that is left.

    python benchmarks/kill_drill.py --points 10

For each point a training on three ranks (one encoder stage, two LLM stages) saves every second step
in the background, alternately as a file and as shards. A random rank is killed (SIGKILL) after a
random delay within a random step. Measured is how long until every process is gone. Then every
checkpoint in the folder must load, and training resumed from the newest one must give exactly the
losses of a training that was never interrupted.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import socket
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

NUM_RANKS = 3
NUM_STEPS = 12
SAVE_EVERY = 2
FIRST_KILL = 2 * SAVE_EVERY  # the first checkpoint is whole once the second begins


@dataclass(frozen=True)
class Point:
    """Where a rank is killed."""

    rank: int
    step: int
    delay_ms: float
    checkpoint: str


@dataclass(frozen=True)
class Outcome:
    """What was left."""

    point: Point
    seconds_until_all_gone: float
    resumed_from_step: int
    num_losses: int
    equal: bool


def random_points(count: int, seed: int) -> list[Point]:
    """Points, the kind of checkpoint alternating."""
    draw = random.Random(seed)
    return [
        Point(
            rank=draw.randrange(NUM_RANKS),
            step=draw.randrange(FIRST_KILL, NUM_STEPS),
            delay_ms=round(draw.uniform(0, 60), 1),
            checkpoint=("consolidated", "sharded")[index % 2],
        )
        for index in range(count)
    ]


def fit(folder: Path, checkpoint: str, kill: Point | None, ckpt_path: Path | None) -> list[float]:
    """One training on this rank; the losses of its steps."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    from lightning_entrain.models.tiny import nano_vlm
    from lightning_entrain.module import EntrainLightningModule
    from lightning_entrain.strategy import EntrainStrategy

    class Module(EntrainLightningModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if kill and (self.global_step, self.global_rank) == (kill.step, kill.rank):
                threading.Timer(
                    kill.delay_ms / 1000, os.kill, (os.getpid(), signal.SIGKILL)
                ).start()
            loss = super().training_step(batch, batch_idx)
            losses.append(loss.item())
            if kill and self.global_step >= kill.step:
                time.sleep(0.02)  # so that the delay ends inside a step
            return loss

    losses: list[float] = []
    pl.seed_everything(0, verbose=False)
    saver = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=SAVE_EVERY)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=NUM_RANKS,
        strategy=EntrainStrategy(llm_stages=2, checkpoint=checkpoint, async_checkpoint=True),
        max_steps=NUM_STEPS,
        callbacks=[saver] if ckpt_path is None else [],
        enable_checkpointing=ckpt_path is None,
        limit_val_batches=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module(nano_vlm(), warmup_steps=2, max_steps=NUM_STEPS)
    trainer.fit(module, datamodule=make_data(folder.parent), ckpt_path=ckpt_path)
    return losses


def make_data(cache: Path) -> Any:
    """Images and texts of random sizes; an epoch is 8 steps."""
    from lightning_entrain import EntrainDataModule
    from lightning_entrain.data.synthetic import SyntheticSource
    from lightning_entrain.data.tokenizer import ByteTokenizer

    return EntrainDataModule(
        SyntheticSource(32, max_side=90),
        global_batch_size=4,
        num_microbatches=2,
        tokenizer=ByteTokenizer(),
        val_fraction=0.0,
        cache_dir=str(cache),
        num_workers=0,
        progress=False,
    )


class Job:
    """Ranks as forked processes."""

    def __init__(self, *arguments: Any) -> None:
        context = multiprocessing.get_context("fork")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.processes, self.pipes = [], []
        for rank in range(NUM_RANKS):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(rank, port, theirs, arguments))
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def losses(self) -> list[list[float]]:
        """The losses of every rank."""
        found = [pipe.recv() for pipe in self.pipes]
        for process in self.processes:
            process.join()
        return found

    def seconds_between_ends(self, limit: float) -> float:
        """From the end of the first process to that of the last one."""
        first = None
        while any(process.is_alive() for process in self.processes):
            if first is None and not all(process.is_alive() for process in self.processes):
                first = time.monotonic()
            if first is not None and time.monotonic() - first > limit:
                for process in self.processes:
                    process.kill()
                raise SystemExit(f"a process is still there {limit:g} s after the kill")
            time.sleep(0.01)
        return 0.0 if first is None else time.monotonic() - first


def _rank(rank: int, port: int, pipe: Any, arguments: Any) -> None:
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(NUM_RANKS))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch

    torch.set_num_threads(1)
    try:
        pipe.send(fit(*arguments))
    except BaseException:
        os._exit(1)
    os._exit(0)


def drill(point: Point, folder: Path, whole: list[list[float]], limit: float = 20.0) -> Outcome:
    """Kill at a point, resume, compare.

    Args:
        point: Where to kill.
        folder: An empty folder for checkpoints.
        whole: Losses of the uninterrupted training, rank by rank.
        limit: Seconds after which a process that is still there is a failure.
    """
    from lightning_entrain.checkpoint.files import EntrainCheckpointIO

    job = Job(folder, point.checkpoint, point, None)
    seconds = job.seconds_between_ends(limit)
    codes = [process.exitcode for process in job.processes]
    assert codes[point.rank] == -signal.SIGKILL, codes
    assert 0 not in codes, codes
    steps = {}
    for path in folder.glob("*.ckpt"):
        steps[int(EntrainCheckpointIO().load_checkpoint(path)["global_step"])] = path
    newest = max(steps)
    resumed = Job(folder, point.checkpoint, None, steps[newest]).losses()
    equal = resumed == [losses[newest:] for losses in whole]
    return Outcome(
        point=point,
        seconds_until_all_gone=round(seconds, 2),
        resumed_from_step=newest,
        num_losses=len(resumed[0]),
        equal=equal,
    )


def uninterrupted(folder: Path) -> list[list[float]]:
    """Losses of a training that nobody kills."""
    data = make_data(folder.parent)
    data.prepare_data()
    return Job(folder, "consolidated", None, None).losses()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", help="write the outcomes to this JSON file")
    arguments = parser.parse_args()
    import lightning_entrain.strategy  # noqa: F401  (imported once, before the forks)

    outcomes = []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "whole").mkdir()
        whole = uninterrupted(root / "whole")
        for index, point in enumerate(random_points(arguments.points, arguments.seed)):
            folder = root / f"{index}"
            folder.mkdir()
            outcome = drill(point, folder, whole)
            outcomes.append(outcome)
            print(json.dumps(asdict(outcome)), flush=True)
    if arguments.output:
        Path(arguments.output).write_text(json.dumps([asdict(o) for o in outcomes], indent=1))
    slowest = max(outcome.seconds_until_all_gone for outcome in outcomes)
    equal = sum(outcome.equal for outcome in outcomes)
    print(f"all gone after at most {slowest} s; {equal} of {len(outcomes)} curves equal exactly")
    if equal < len(outcomes):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
