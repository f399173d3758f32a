"""With a data module the strategy plans the layout itself, or carries out a plan from a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_entrain.data.synthetic import SyntheticSource
from lightning_entrain.data.tokenizer import ByteTokenizer
from lightning_entrain.datamodule import EntrainDataModule
from lightning_entrain.errors import ConfigError
from lightning_entrain.models.tiny import nano_vlm
from lightning_entrain.plan.types import ParallelPlan
from lightning_entrain.planning import workload_of
from lightning_entrain.runtime.step_plan import StepPlan
from lightning_entrain.strategy import EntrainStrategy
from tests.distributed.job import Job, Module
from tests.distributed.ranks import run_ranks

PLAN = ParallelPlan(
    dp=1,
    encoder_layers=((0, 1), (1, 3)),
    llm_layers=((0, 3),),
    num_microbatches=5,
    global_batch_size=8,
)


def datamodule(root: Path, **options: Any) -> EntrainDataModule:
    source = SyntheticSource(40, text_only_fraction=0.2, max_side=160)
    return EntrainDataModule(
        source,
        global_batch_size=8,
        num_microbatches=4,
        tokenizer=ByteTokenizer(),
        cache_dir=str(root / "cache"),
        progress=False,
        **{"num_workers": 0, **options},
    )


class KeepPlan(pl.Callback):
    """Keeps the plan of the last training step."""

    step: StepPlan | None = None

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if isinstance(trainer.strategy, EntrainStrategy):
            self.step = trainer.strategy.last_step_plan


def fit(
    strategy: dict[str, Any] | None, devices: int, root: Path, data: dict[str, Any], rounds: int = 4
) -> dict[str, Any]:
    module = Module(nano_vlm(), Job())
    module.model.scalars["num_correct"] = lambda logits, labels: (labels >= 0).sum()
    made = None if strategy is None else EntrainStrategy(**strategy)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        max_steps=rounds,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        logger=CSVLogger(root, name="log", version="0"),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[keeper := KeepPlan()],
        **({} if made is None else {"strategy": made}),
    )
    trainer.fit(module, datamodule=datamodule(root, **data))
    found: dict[str, Any] = {"losses": module.losses, "val": module.val_losses}
    if made is not None:
        assert keeper.step is not None
        found |= {
            "layout": made.layout.describe(),
            "plan": None if made.plan is None else made.plan.to_json(),
            "predicted_ms": keeper.step.predicted_ms,
            "planning_ms": keeper.step.planning_ms,
        }
    return found


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return fit(None, 1, tmp_path_factory.mktemp("one"), {"assignment": "fixed"})


@pytest.mark.parametrize(
    "data",
    [{"assignment": "joint"}, {"assignment": "joint", "max_lag": 1}, {"assignment": "entrain"}],
)
def test_the_layout_is_planned_and_each_step_too(
    data: dict[str, Any], one: dict[str, Any], tmp_path: Path
) -> None:
    datamodule(tmp_path).prepare_data()
    ranks = run_ranks(3, fit, {}, 3, tmp_path, data)
    for rank in ranks:
        assert rank["losses"] == pytest.approx(one["losses"], rel=1e-5)
        assert rank["layout"] == ranks[0]["layout"]
        assert rank["plan"] == ranks[0]["plan"]
        assert rank["predicted_ms"] > 0, "schedules are chosen by simulation"
        assert rank["planning_ms"] > 0
    plan = ParallelPlan.from_json(ranks[0]["plan"])
    assert plan.encoder_stages + plan.llm_stages == 3
    assert plan.b_min is not None
    assert "b_min" in (tmp_path / "log" / "0" / "hparams.yaml").read_text()


def test_a_plan_from_a_file(one: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(PLAN.to_json())
    datamodule(tmp_path).prepare_data()
    ranks = run_ranks(3, fit, {"plan": str(path)}, 3, tmp_path, {})
    for rank in ranks:
        assert "encoder layers [0-0, 1-2], LLM layers [0-2]" in rank["layout"]
        assert rank["losses"] == pytest.approx(one["losses"], rel=1e-5)


@pytest.mark.parametrize(
    ("placement", "devices", "replicas", "ranks"),
    [
        ("shared_boundary", 3, 1, {(0, 1, 1, 2), (0, 1, 2, 2), (0, 0, 1, 2)}),
        ("v_shaped", 2, 1, {(0, 1, 1, 0)}),
        ("colocated", 2, 1, {(0, 1, 0, 1)}),
        ("v_shaped", 4, 2, {(0, 1, 1, 0)}),
    ],
)
def test_ranks_with_several_stages_train_as_one_process(
    placement: str,
    devices: int,
    replicas: int,
    ranks: set[tuple[int, ...]],
    one: dict[str, Any],
    tmp_path: Path,
) -> None:
    datamodule(tmp_path).prepare_data()
    wish = {"placement": placement, "replicas": replicas}
    data = {"assignment": "joint"}
    found = run_ranks(devices, fit, wish, devices, tmp_path, data)
    for rank in found:
        assert rank["losses"] == pytest.approx(one["losses"], rel=1e-5)
        assert rank["val"] == pytest.approx(one["val"], rel=1e-5)
        assert rank["plan"] == found[0]["plan"]
        assert rank["predicted_ms"] > 0
    plan = ParallelPlan.from_json(found[0]["plan"])
    assert plan.stage_to_rank in ranks or plan.stage_to_rank == tuple(range(devices))
    assert plan.num_gpus == devices
    # The same plan from a file.
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    again = run_ranks(devices, fit, {"plan": str(path)}, devices, tmp_path / "again", data, 2)
    assert again[0]["layout"] == found[0]["layout"]
    assert again[0]["losses"] == pytest.approx(one["losses"][:2], rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"placement": "w_shaped"},
            r"placement is 'w_shaped'\. Limit: one of one_per_rank, shared",
        ),
        ({"placement": "v_shaped", "llm_stages": 2}, r"llm_stages=2 with placement=v_shaped"),
        ({"placement": "v_shaped", "plan": PLAN}, r"placement=v_shaped beside a plan"),
    ],
)
def test_placements_that_contradict_other_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EntrainStrategy(**options)


@pytest.mark.parametrize(
    ("plan", "options", "message"),
    [
        (replace(PLAN, llm_tp=2), {}, r"plan.llm_tp=2 is not runnable yet.*runnable_only=true"),
        (replace(PLAN, dp=2), {}, r"plan is for 6 devices.*this job has 3"),
        (PLAN, {"llm_stages": 2}, r"llm_stages=2 beside a plan with llm_stages 1"),
        (
            replace(PLAN, llm_layers=((0, 5),)),
            {},
            r"plan.llm_layers ends at layer 5.*the model's llm has 3 layers",
        ),
        (Path("missing.json"), {}, r"strategy.plan=missing.json cannot be read"),
    ],
)
def test_plans_that_cannot_be_carried_out(
    plan: Any, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    def start() -> None:
        strategy = EntrainStrategy(plan=plan, **options)
        trainer = pl.Trainer(
            accelerator="cpu", devices=3, strategy=strategy, default_root_dir=str(tmp_path)
        )
        trainer.fit(Job().module(), [0])

    with pytest.raises(ConfigError, match=message):
        start()


def test_profile_of_the_data_module(tmp_path: Path) -> None:
    data = datamodule(tmp_path)
    data.prepare_data()
    with pytest.raises(ConfigError, match="does not know what samples cost"):
        data.profile()
    workload = workload_of(nano_vlm(), torch.device("cpu"))
    profile = data.profile(workload, num_gpus=8)
    assert profile.b_min.b_min >= 1
    assert sum(profile.proportions.values()) == pytest.approx(1)
    assert set(profile.split_names) == {1, 4, 16, 64, 256}
