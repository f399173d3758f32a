"""The app entrain-profile, and plans from its profiles."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from lightning_entrain import plan_app, profile_app
from lightning_entrain.conf_path import conf_dir
from lightning_entrain.errors import ConfigError, EntrainError
from lightning_entrain.profile_estimate import duration_text, estimated_seconds
from lightning_entrain.profiling import default_sizes
from lightning_entrain.this_cpu import cpu_name, this_cpu
from lightning_entrain.workload.hardware import cpu_device
from lightning_entrain.workload.hf_config import model_shape
from lightning_entrain.workload.measured import Profile


def compose_app(app: str, *overrides: str) -> DictConfig:
    profile_app.register_configs()
    plan_app.register_configs()
    with initialize_config_dir(str(conf_dir() / "planning"), version_base="1.3"):
        return compose(app, overrides=list(overrides))


QUICK = ("sizes=[16,64,256]", "seconds_per_point=0.01", "threads=1")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    command = [sys.executable, "-m", "lightning_entrain.profile_app", *QUICK, f"output={path}"]
    done = subprocess.run(command, cwd=path.parent, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert "tiny_vlm on cpu (" in done.stdout
    # 7 layers at 16 rows once, at 64 and 256 rows as one sequence and as four
    assert done.stderr.startswith("35 timings, of 16 to 256 rows, take about ")
    assert "Timing layers" in done.stderr
    assert "35/35" in done.stderr
    assert [item.name for item in path.parent.iterdir()] == ["profile.json"]
    return path


def test_profile_covers_every_layer(written: Path) -> None:
    profile = Profile.from_json(written.read_text())
    kinds = [layer.kind for layer in profile.layers]
    assert kinds == [
        "patch_embed",
        "encoder_block",
        "encoder_block",
        "projector",
        "embedding",
        "decoder_block",
        "head",
    ]
    assert profile.device == cpu_name()
    assert set(profile.versions) == {"python", "torch", "transformers"}
    for layer in profile.layers:
        for fit in (layer.forward, layer.backward):
            assert min(fit.per_pair, fit.per_row, fit.constant) >= 0
            assert fit.per_row + fit.constant > 0
        assert all(item.forward_ms > 0 and item.backward_ms > 0 for item in layer.measurements)


def test_plan_from_the_profile(written: Path) -> None:
    options = ["model=tiny_vlm", "cluster=this_cpu", f"profile={written}", "data.num_samples=500"]
    options += ["training.precision=32-true", "global_batch_size=16", "dp=null"]
    report = plan_app.make_report(compose_app("plan", *options))
    assert report.plan.cost_model.startswith("measured (cpu")
    assert (report.plan.encoder_stages, report.plan.llm_stages) == (1, 1)
    other = [*options, "training.precision=bf16-true"]
    with pytest.raises(ConfigError, match="dtype is 'float32', wanted is 'bfloat16'"):
        plan_app.make_report(compose_app("plan", *other))
    other = [*options, "cluster=a100_8", "allow_other_device=true"]
    assert plan_app.make_report(compose_app("plan", *other)).plan.num_gpus == 8
    with pytest.raises(ConfigError, match="wanted is 'a100-80'"):
        plan_app.make_report(compose_app("plan", *options, "cluster=a100_8"))


def test_a_record_of_another_machine_is_refused(written: Path, tmp_path: Path) -> None:
    record = json.loads(written.read_text())
    record["device"] = "cpu (another)"
    (tmp_path / "p.json").write_text(json.dumps(record))
    options = ["model=tiny_vlm", "cluster=this_cpu", f"profile={tmp_path / 'p.json'}"]
    with pytest.raises(ConfigError, match="another"):
        plan_app.make_report(
            compose_app("plan", *options, "training.precision=32-true", "data.num_samples=50")
        )


def test_this_cpu_is_measured() -> None:
    cpu = this_cpu()
    assert 1e-3 < cpu.peak("float32") < 20
    assert 0.5 < cpu.bandwidth_gbps < 2000
    assert cpu.memory_gib > 0.5


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("device=tpu", "device is 'tpu'"),
        ("dtype=int8", "dtype is 'int8'"),
        ("sizes=[]", "sizes is"),
        ("sizes=[2]", "sizes is"),
        ("seconds_per_point=0", "seconds_per_point is 0"),
        ("threads=0", "threads is 0"),
        ("cpu_time=true", "cpu_time is true"),
        ("model=llava1_5_7b", "not Qwen2.5-VL"),
    ],
)
def test_bad_options(override: str, message: str) -> None:
    with pytest.raises(EntrainError, match=message):
        profile_app.run_profile(compose_app("profile", *QUICK[:2], override))


def test_the_estimate_grows_with_what_is_asked() -> None:
    config = compose_app("profile")
    assert config.sizes is None
    assert max(default_sizes("cpu")) < max(default_sizes("cuda"))
    shape = model_shape(config.model)
    slow = cpu_device(peak_tflops=0.1, bandwidth_gbps=20.0, memory_gib=8.0)

    def seconds(*sizes: int, each: float = 0.0) -> float:
        return estimated_seconds(shape, slow, sizes, each)

    assert seconds(256) < seconds(1024) < 0.1 * seconds(16384)
    # Quick calls are repeated for as long as was asked, at most 50 times.
    assert 7 * 2 * 0.01 < seconds(64, each=0.01) <= 51 / 4 * seconds(64) * 1.001
    # The warm-up and three repetitions
    once = seconds(16384) / 4
    assert seconds(16384, each=1e9) == pytest.approx(51 * once)
    assert [duration_text(value) for value in (0.2, 61, 200)] == ["1 s", "61 s", "3 min"]
