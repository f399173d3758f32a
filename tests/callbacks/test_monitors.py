"""All monitors in whole fits on forked ranks, read back from the offline W&B files."""

import json
import re
import time
import warnings
from pathlib import Path

import lightning.pytorch as pl
import pytest

from lightning_entrain.callbacks.batch_size import BatchSizeAdvisor
from lightning_entrain.callbacks.drift import CostModelDriftMonitor
from lightning_entrain.callbacks.memory import MemoryMonitor
from lightning_entrain.callbacks.report import RunReport
from lightning_entrain.callbacks.throughput import ThroughputMonitor
from lightning_entrain.callbacks.timeline import PipelineTimelineMonitor
from lightning_entrain.callbacks.variability import WorkloadVariabilityMonitor, measure
from lightning_entrain.errors import ConfigError
from lightning_entrain.loggers import StepCSVLogger, make_wandb_logger
from lightning_entrain.observe.run_files import read_run
from lightning_entrain.observe.run_record import RunRecord
from lightning_entrain.strategy import EntrainStrategy
from tests.callbacks.test_variability import read_complete
from tests.distributed.job import Batches, Job
from tests.distributed.ranks import run_ranks

MONITORS = (
    WorkloadVariabilityMonitor,
    PipelineTimelineMonitor,
    ThroughputMonitor,
    MemoryMonitor,
    CostModelDriftMonitor,
    BatchSizeAdvisor,
)
NUM_STEPS = 5


def monitors():
    return [
        WorkloadVariabilityMonitor(),
        PipelineTimelineMonitor(every_n_steps=1, picture_every_n_steps=2),
        ThroughputMonitor(every_n_steps=1, device_name="h100"),
        MemoryMonitor(every_n_steps=2),
        CostModelDriftMonitor(every_n_steps=1),
        BatchSizeAdvisor(),
        RunReport(show_plan=False),
    ]


class Data(pl.LightningDataModule):
    """The job's batches, planned with the strategy's costs and planner."""

    def __init__(self, job):
        super().__init__()
        self.job = job

    def train_sizes(self):
        return list(Batches(self.job, 1, None).source.sizes)

    @property
    def shape(self):
        from lightning_entrain.data.planned import BatchShape

        return BatchShape(
            global_batch_size=self.job.batch_size, num_microbatches=self.job.num_microbatches
        )

    def train_dataloader(self):
        import torch

        strategy = self.trainer.strategy
        needs = strategy.data_needs
        batches = Batches(self.job, strategy.num_replicas, needs)
        return torch.utils.data.DataLoader(batches, batch_size=None)


class SlowStage(pl.Callback):
    """Makes one rank's share of the LLM slow."""

    def __init__(self, rank, seconds):
        self.rank, self.seconds = rank, seconds

    def on_train_start(self, trainer, pl_module):
        if trainer.global_rank != self.rank:
            return
        plain = pl_module.model.llm_stage

        def slow(*args, **kwargs):
            time.sleep(self.seconds)
            return plain(*args, **kwargs)

        pl_module.model.llm_stage = slow


def fit(options, devices, root, extra=(), logging=True):
    """One fit; what rank 0 keeps, and its callback metrics."""
    import wandb

    job = Job(num_batches=NUM_STEPS, num_microbatches=3)
    callbacks = [*monitors(), *extra]
    if not logging:
        callbacks[1].every_n_steps = 20
    loggers = False
    if logging:
        loggers = [
            make_wandb_logger(str(root), name="case", group="tests", mode="offline"),
            StepCSVLogger(root),
        ]
    job.trainer = {"callbacks": callbacks, "logger": loggers, "log_every_n_steps": 2}
    module = job.module()
    trainer = job.make_trainer(EntrainStrategy(**options), devices, root)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, datamodule=Data(job))
    if wandb.run is not None:
        wandb.finish()
    timeline, drift = callbacks[1], callbacks[4]
    idle = timeline.last_idle
    return {
        "metrics": {key: float(value) for key, value in trainer.callback_metrics.items()},
        "idle": idle,
        "times": drift.times,
        "suggestion": drift.suggestion,
        "warnings": [str(w.message) for w in caught],
        "plan": trainer.strategy.plan,
        "record": callbacks[6].record,
        "folder": None if callbacks[6].path is None else str(callbacks[6].path.parent),
        "refitted": None if drift.times is None else drift.refitted().cost_model.factors,
    }


@pytest.fixture
def offline(tmp_path, monkeypatch):
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb-own"))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    return tmp_path


def documented(devices):
    """Keys of all docstrings' tables, `rank<r>` written out, without those that need a GPU."""
    found = set()
    for monitor in MONITORS:
        for key in re.findall(r"\| `([a-z_0-9<>]+/[a-z_<>0-9]+)` \|", monitor.__doc__):
            numbered = range(devices) if "<r>" in key else (0,)
            found |= {key.replace("<r>", str(rank)) for rank in numbered}
    return found - {"memory/predicted_peak_gib", "memory/peak_over_predicted"}


@pytest.mark.parametrize(
    ("options", "devices"),
    [
        ({"encoder_stages": 1, "llm_stages": 1}, 2),
        ({"encoder_stages": 1, "llm_stages": 1, "replicas": 2}, 4),
    ],
    ids=["1 replica", "2 replicas"],
)
def test_wandb_holds_exactly_the_documented_keys_once_per_step(offline, options, devices):
    results = run_ranks(devices, fit, options, devices, offline, timeout=100)
    (path,) = offline.glob("wandb/offline-run-*/*.wandb")  # one run, from rank 0
    file = read_complete(path)
    assert (file.name, file.group) == ("case", "tests")
    sections = ("variability/", "pipeline/", "throughput/", "memory/", "plan/")
    by_step = {}
    for row in file.history:
        for key, value in row.items():
            if key.startswith(sections) and not key.startswith("pipeline/timeline"):
                assert key not in by_step.setdefault(row["trainer/global_step"], {})
                by_step[row["trainer/global_step"]][key] = value
    assert sorted(by_step) == list(range(NUM_STEPS))
    logged = set().union(*by_step.values())
    assert logged == documented(devices)
    assert results[0]["metrics"].keys() == results[-1]["metrics"].keys()
    check_steps(by_step, results[0], devices)
    for section in sections:
        assert file.metrics[f"{section}*"]["step_metric"] == "trainer/global_step"
    assert file.config["plan"]["encoder_stages"] == 1
    assert {kind for kind, _ in file.artifacts} >= {"trace", "plan"}
    pages = [row for row in file.history if "pipeline/timeline/_type" in row]
    assert [row["trainer/global_step"] for row in pages] == [3, 4]
    folder = Path(results[0]["folder"])
    assert folder.parent.parent == offline  # project and id of the first logger, W&B
    trace = json.loads((folder / "trace.json").read_text())
    assert {event["pid"] for event in trace["traceEvents"]} == set(range(devices // 2))
    record = RunRecord.from_json((folder / "run_record.json").read_text())
    assert record.to_json() == results[0]["record"].to_json()
    assert set(record.policies) == {"this run", "fixed", "disttrain", "entrain"}
    assert record.policies["this run"]["encoder_cv"] == record.policies["fixed"]["encoder_cv"]
    assert len(record.series["train/loss"]) == NUM_STEPS
    assert (folder / "report.html").stat().st_size < 1_000_000
    assert ("report", f"report-{path.stem.split('-')[-1]}") in file.artifacts
    # The values alone give the same report again.
    again = read_run(path)
    for key in ("variability/llm_cv", "pipeline/bubble_ratio"):
        assert dict(again.series[key]) == pytest.approx(dict(record.series[key]), rel=1e-6)
    from_csv = read_run(offline / "metrics.csv")
    assert from_csv.series.keys() >= again.series.keys() - {"train/loss"}


def check_steps(by_step, result, devices):
    """Values that another way of computing them confirms."""
    job = Job(num_batches=NUM_STEPS, num_microbatches=3)
    batches = Batches(job, devices // 2, None)
    for step, values in by_step.items():
        assignment_values = variability_of(batches, step)
        for key in ("encoder_std", "llm_std", "deferred_samples", "num_microbatches"):
            assert values[f"variability/{key}"] == pytest.approx(
                assignment_values[f"variability/{key}"], rel=1e-6
            )
        parts = ("fill_drain", "imbalance", "communication")
        total = sum(values[f"pipeline/{part}_ratio"] for part in parts)
        assert total == pytest.approx(values["pipeline/bubble_ratio"], abs=1e-6)
        ranks = [values[f"pipeline/rank{rank}_bubble_ratio"] for rank in range(devices)]
        assert sum(ranks) / devices == pytest.approx(values["pipeline/bubble_ratio"], abs=1e-6)
        if step:
            size, seconds = job.batch_size, values["throughput/step_seconds"]
            assert values["throughput/samples_per_sec"] <= size / seconds * (1 + 1e-6)
            assert values["throughput/mfu"] * 66.9 == pytest.approx(
                values["throughput/tflops_per_device"], rel=1e-6
            )
    assert by_step[0]["plan/b_min"] == result["plan"].b_min
    assert by_step[0]["plan/global_batch_size"] == job.batch_size


def variability_of(batches, step):
    from lightning_entrain.assign import assign_samples
    from lightning_entrain.observe.batch_costs import table_costs
    from lightning_entrain.workload.tables import SizeTable

    size = batches.job.batch_size
    sizes = [batches.source.sizes[i] for i in range(step * size, (step + 1) * size)]
    costs = table_costs(SizeTable.from_sizes(sizes))
    assignment = assign_samples(
        *costs,
        num_replicas=batches.replicas,
        num_microbatches=batches.job.num_microbatches,
        policy="fixed",
        limit_by_heaviest=False,
        equal_counts=False,
    )
    return measure(assignment, sizes, in_milliseconds=False)


def test_a_slow_stage_is_found_and_a_better_plan_named(offline):
    """The first LLM stage, of two layers, sleeps in every forward; nothing is logged anywhere."""
    options = {"encoder_stages": 1, "llm_stages": 2, "schedule": "1f1b"}
    found = run_ranks(
        3, fit, options, 3, offline, [SlowStage(rank=1, seconds=0.08)], False, timeout=100
    )[0]
    busy = [rank.busy_ms for rank in found["idle"].ranks]
    assert busy.index(max(busy)) == 1
    assert found["idle"].imbalance_ratio > 0.15
    # Neither the first steps nor only the first look: the last step is looked at as well.
    assert [step for step, _ in found["record"].series["pipeline/bubble_ratio"]] == [3, 4]
    assert found["record"].timeline_step == 4
    assert found["times"].drift(range(1, 2)) > 0.25
    assert found["suggestion"].gain > 0.05
    (warning,) = [w for w in found["warnings"] if "CostModelDriftMonitor" in w]
    assert "LLM stage 0 took" in warning
    assert found["suggestion"].describe() in warning
    assert found["refitted"]["llm"] > found["refitted"]["encoder"]
    assert not list(offline.glob("**/*.wandb"))
    advice = found["record"].advice[0]
    assert advice.startswith("LLM stage 0 is the bottleneck")
    assert "times as long as the cost model predicts" in advice
    assert found["suggestion"].describe() in advice


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: PipelineTimelineMonitor(every_n_steps=0),
        lambda: MemoryMonitor(every_n_steps=0),
        lambda: ThroughputMonitor(device_name="h1000"),
        lambda: CostModelDriftMonitor(tolerance=0.0),
    ],
)
def test_wrong_options_name_value_and_limit(wrong):
    with pytest.raises(ConfigError, match="Limit"):
        wrong()
