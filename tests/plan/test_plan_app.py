"""The app entrain-plan."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from rich.console import Console

from lightning_entrain.conf_path import conf_dir
from lightning_entrain.errors import ConfigError, DataError, EntrainError
from lightning_entrain.output_file import check_file, check_folder
from lightning_entrain.plan.planner import PlanReport
from lightning_entrain.plan.types import ParallelPlan
from lightning_entrain.plan_app import make_report, register_configs, write_plan
from lightning_entrain.plan_report import print_report

FOLDER = conf_dir() / "planning"


def options(*overrides: str) -> DictConfig:
    register_configs()
    with initialize_config_dir(str(FOLDER), version_base="1.3"):
        return compose("plan", overrides=["data.num_samples=4000", *overrides])


def report(*overrides: str, **arguments: object) -> PlanReport:
    return make_report(options(*overrides), **arguments)  # type: ignore[arg-type]


def printed(found: PlanReport) -> str:
    buffer = io.StringIO()
    print_report(found, console=Console(file=buffer, width=140))
    return buffer.getvalue()


@pytest.mark.parametrize("group", ["model", "data", "cluster"])
def test_every_choice_gives_a_plan(group: str) -> None:
    for path in sorted((FOLDER / group).glob("*.yaml")):
        fixed = {
            "model": ["cluster=h100_64", "training.precision=bf16-true"],
            "data": [],
            "cluster": ["microbatch_sizes=[1]", "global_batch_size=1024"],
        }[group]
        if path.stem == "this_cpu":
            fixed = [*fixed, "model=tiny_vlm"]
        found = report(f"{group}={path.stem}", "num_best=1", *fixed)
        assert found.plan.iteration_ms > 0


def test_the_page_lists_every_choice() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "planning.md").read_text()
    for group in ("model", "cluster"):
        rows = page.split(f"| `{group}=` | what |\n|---|---|\n")[1].split("\n\n")[0]
        listed = [row.split("`")[1] for row in rows.splitlines()]
        assert listed == sorted(path.stem for path in (FOLDER / group).glob("*.yaml"))


def test_the_paper_command() -> None:
    names = {"model": "m", "data": "llava150k", "cluster": "paper"}
    found = report(names=names)
    plan = found.plan
    assert (plan.dp, plan.num_microbatches, plan.gpus_per_replica) == (4, 32, 16)
    assert set(plan.trials) == {1, 4, 16, 64, 256}
    assert plan.b_min == found.profile.b_min.b_min
    assert plan.data == "llava150k"
    text = printed(found)
    for part in ("b_min = ", "10:6 (59)", "tokens/s", "chosen", "Limited by: ", "Not runnable yet"):
        assert part in text
    assert len(text.splitlines()) > 30


def test_runnable_plans_only() -> None:
    found = report("runnable_only=true", "encoder_tp=null", "llm_tp=null")
    assert all(plan.encoder_tp == plan.llm_tp == 1 for plan in found.result.plans)
    assert "Not runnable" not in printed(found)


def test_a_given_size_that_cannot_run_contradicts_runnable_only() -> None:
    with pytest.raises(ConfigError, match=r"encoder_tp is 2 with runnable_only=true.*=null"):
        report("runnable_only=true")


def test_small_batches_and_boundaries_are_warned_of() -> None:
    small = report("global_batch_size=4", "dp=1", "cluster.num_gpus=16", "microbatch_sizes=[1]")
    assert any("smaller than b_min" in item for item in small.warnings)
    border = report("model=qwen2_5vision_llama3_3b", "b_min.max_batch=64")
    assert any("7:9 or 6:10" in item or "6:10 or 7:9" in item for item in border.warnings)


def test_less_data_than_a_global_batch_is_warned_of() -> None:
    (text,) = (w for w in report("data.num_samples=100").warnings if "fewer than" in w)
    assert text.startswith("The table holds 100 samples, fewer than a global batch of 512")
    assert not [w for w in report().warnings if "fewer than" in w]


def test_evaluate_reaches_the_search() -> None:
    found = report(evaluate=lambda plan: float(plan.encoder_stages))
    assert found.plan.encoder_stages == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.name=imagenet", "data is 'imagenet'"),
        ("data.num_samples=0", "num_samples is 0"),
        ("data.sizes=nothing.csv", "not a file"),
        ("cluster.gpu=tpu", "cluster.gpu is 'tpu'"),
        ("cluster.network_gbps=0", "network_gbps is 0"),
        ("microbatch_sizes=[0]", "microbatch_sizes"),
        ("microbatch_sizes=[]", "microbatch_sizes"),
        ("num_best=0", "num_best is 0"),
        ("training.encoder=warm", "training.encoder is 'warm'"),
        ("b_min.alpha=2", "alpha is 2"),
        ("profile=nothing.json", "not a file"),
        ("model.vision_config.model_type=squid", "'squid'"),
        ("model.text_config.model_type=squid", "'squid'"),
        ("~model.text_config.hidden_size", "text_config"),
        ("model.vision_config.depth=0", r"model\.vision_config\.depth is 0.*at least 1"),
        ("model.text_config.num_attention_heads=x", "num_attention_heads is 'x'"),
    ],
)
def test_bad_options(override: str, message: str) -> None:
    with pytest.raises(EntrainError, match=message):
        report(override)


def test_plans_are_written_whole(tmp_path: Path) -> None:
    plan = report().plan
    write_plan(tmp_path / "plan.json", plan)
    assert ParallelPlan.from_json((tmp_path / "plan.json").read_text()) == plan
    (tmp_path / "taken").mkdir()
    for name in ("plan.json/below", "none/plan.json", "taken"):
        with pytest.raises(DataError, match="cannot be written"):
            write_plan(tmp_path / name, plan)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["plan.json", "taken"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", r"which is a folder\. Limit: the name of a file\. Remedy: set output=.*FILE"),
        ("none/plan.json", r"there is no folder .*none\..* Remedy: make it with mkdir -p .*none"),
        ("file/plan.json", r"there is no folder .*file\."),
    ],
)
def test_where_no_file_can_be_is_known_before_the_work(
    name: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=message):
        check_file(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    with pytest.raises(ConfigError, match=r"output is .*exists\. Limit: a folder"):
        check_folder(tmp_path / "file")


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lightning_entrain.plan_app", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)


def test_command_line(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text(
        "vision_tokens,text_tokens\n" + "300,100\n0,500\n700,20\n" * 20
    )
    done = run(tmp_path, "data.sizes=own.csv", "cluster=h100_8", "global_batch_size=64")
    assert done.returncode == 0, done.stderr
    assert "Workload of 60 samples" in done.stdout
    record = json.loads((tmp_path / "plan.json").read_text())
    assert record["num_gpus"] == 8
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own.csv", "plan.json"]
    failed = run(tmp_path, "cluster.num_gpus=1", "dp=null")
    assert failed.returncode == 1
    assert failed.stderr.startswith("Error: 1 GPU for 2 modules")
    assert "Traceback" not in failed.stderr


def test_planning_needs_no_torch() -> None:
    code = "import sys, lightning_entrain.plan_app; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
