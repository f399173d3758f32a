"""`entrain-train` as users run it: results, layouts, resuming, and how it ends when it cannot."""

import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir

from lightning_entrain.conf_path import conf_dir
from lightning_entrain.config import register_configs
from lightning_entrain.errors import ConfigError, DataError
from lightning_entrain.models.tiny import tiny_vlm
from lightning_entrain.module import EntrainLightningModule, LearningRateFactor
from lightning_entrain.observe.run_files import read_record
from lightning_entrain.observe.wandb_file import read_wandb_file
from lightning_entrain.run_folder import run_folder
from lightning_entrain.run_report import report_lines
from lightning_entrain.train import train

pytestmark = pytest.mark.timeout(300)
COMMAND = str(Path(sys.executable).with_name("entrain-train"))
QUICK = ["experiment=quick", "data=synthetic", "callbacks.checkpoint.save_top_k=0"]


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """Caches and W&B files below the test's folder, no account, one thread per process."""
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb-own"))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "HYDRA_FULL_ERROR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("LIGHTNING_ENTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


@pytest.fixture
def launch(environment):
    """Runs the command in the test's folder and checks that no process stays."""

    def run(*overrides, timeout=250):
        done = subprocess.run(
            [COMMAND, *overrides],
            cwd=environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=timeout,
            env=dict(os.environ),
        )
        assert processes_with(str(environment)) == []
        return done

    return run


def processes_with(text):
    """Command lines of running processes that work in or name a folder."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            place = os.readlink(folder / "cwd")
        except OSError:
            continue
        if "entrain-train" in line and (text in line or text in place):
            found.append(line)
    return found


def composed(run_dir, *overrides):
    register_configs()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return compose("train", overrides=[f"run_dir={run_dir}", *overrides])


def losses(folder):
    (path,) = Path(folder).rglob("metrics.csv")
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(len(rows)))
    return [float(row["train/loss"]) for row in rows]


@pytest.mark.slow
def test_the_main_job_learns_and_leaves_what_it_says(launch, environment):
    """The defaults with fewer, smaller charts; the loss falls to below 60 % of its start."""
    folder = environment / "run"
    small = ["data.source.num_samples=24", "data.source.max_side=600", "data.global_batch_size=8"]
    done = launch(*small, "trainer.max_steps=16", f"hydra.run.dir={folder}")
    assert done.returncode == 0, done.stderr
    found = losses(folder)
    assert len(found) == 16
    assert sum(found[-3:]) / 3 < 0.6 * found[0]
    assert "Traceback" not in done.stderr

    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("  ")]
    report = {line[0]: " ".join(line[1:]) for line in lines}
    assert report["train/loss"] == f"first {found[0]:.4f}, last {found[-1]:.4f}"
    assert report["steps"] == "16 on 3 process(es)"
    assert float(report["samples/s"]) > 0
    assert float(report["tokens/s"].split()[0].replace(",", "")) > 0
    more = [f"ckpt_path={report['checkpoint']}", "trainer.max_steps=32"]
    assert report["next"] == " ".join(["entrain-train", *small, *more])
    assert done.stdout.count("Run finished") == 1
    assert done.stdout.count("step 16/16") == 1

    (wandb_file,) = folder.glob("wandb/offline-run-*/*.wandb")
    assert wandb_file.stat().st_size > 1000
    assert (environment / report["W&B"].split()[0]).samefile(wandb_file.parent)
    with open(folder / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    for name in ("encoder_cv", "encoder_std", "llm_cv", "llm_std"):
        spread = [float(row[f"variability/{name}"]) for row in rows]
        assert min(spread) >= 0
        assert max(spread) > 0

    # The checkpoint is the whole model's: it loads into a plain module on this one process.
    checkpoint = torch.load(environment / report["checkpoint"], weights_only=False)
    state = checkpoint["state_dict"]
    (embedding,) = [state[name] for name in state if name.endswith("embed_tokens.weight")]
    module = EntrainLightningModule(tiny_vlm(len(embedding), image_token_id=0))
    module.load_state_dict(state, strict=True)
    assert checkpoint["global_step"] == 16


@pytest.mark.slow
def test_a_layout_and_one_process_train_alike(launch, environment):
    result = train(composed(environment / "single", *QUICK, "strategy=single"))
    expected = losses(environment / "single")
    assert len(expected) == 12
    assert result.summary.first_loss == pytest.approx(expected[0], rel=1e-6)
    layout = ["strategy.encoder_stages=1", "strategy.llm_stages=2"]
    done = launch(*QUICK, *layout, f"hydra.run.dir={environment / 'several'}")
    assert done.returncode == 0, done.stderr
    assert losses(environment / "several") == pytest.approx(expected, rel=1e-5)


def test_a_resumed_run_goes_on_as_if_it_had_not_ended(environment):
    common = [*QUICK, "strategy=single", "module.max_steps=8", "logger=csv"]
    train(composed(environment / "whole", *common, "trainer.max_steps=8"))
    train(composed(environment / "first", *common, "trainer.max_steps=5"))
    checkpoint = environment / "first" / "checkpoints" / "last.ckpt"
    resume = [f"ckpt_path={checkpoint}", "trainer.max_steps=8"]
    train(composed(environment / "second", *common, *resume))
    whole = losses(environment / "whole")
    assert losses(environment / "first") == pytest.approx(whole[:5], rel=1e-6)
    with open(environment / "second" / "metrics.csv", newline="") as file:
        rows = [(int(row["step"]), float(row["train/loss"])) for row in csv.DictReader(file)]
    assert rows == [(step, pytest.approx(whole[step], rel=1e-6)) for step in (5, 6, 7)]


def test_a_run_goes_on_in_its_folder_and_trains_at_the_rates_of_the_longer_run(
    environment, monkeypatch
):
    run = environment / "run"
    options = [*QUICK, "strategy=single", "module.warmup_steps=1", "module.learning_rate=0.002"]
    train(composed(run, *options, "trainer.max_steps=4"))
    last = run / "checkpoints" / "last.ckpt"
    # As of a run that was stopped at step 4, and of one that went further after the checkpoint.
    shutil.copy(last, run / "checkpoints" / "interrupted.ckpt")
    with open(run / "metrics.csv", "a") as file:
        file.write("9" + "," * (len(read_rows(run)[0]) - 1) + "\n")
    former = read_rows(run)[:4]
    resume = [f"ckpt_path={last}", "trainer.max_steps=8"]
    monkeypatch.setattr("lightning_entrain.run_report._given", lambda: resume)
    result = train(composed(run, *options, *resume))

    rows = read_rows(run)
    assert [int(row["step"]) for row in rows] == list(range(8))
    assert [row["train/loss"] for row in rows[:4]] == [row["train/loss"] for row in former]
    rates = [float(row["train/learning_rate"]) for row in rows]
    first, longer = LearningRateFactor(1, 4, 0.1), LearningRateFactor(1, 8, 0.1)
    assert rates[:4] == pytest.approx([0.002 * first(step) for step in range(4)])
    assert rates[4:] == pytest.approx([0.002 * longer(step) for step in range(4, 8)])

    record = read_record(run / "run_record.json")
    shown = record.series["train/loss"]
    assert shown == [
        (step, pytest.approx(float(row["train/loss"]))) for step, row in enumerate(rows)
    ]
    assert not (run / "checkpoints" / "interrupted.ckpt").exists()
    lines = dict(report_lines(result))
    assert lines["steps"] == "4 on 1 process(es), 8 with those before it was resumed"
    assert lines["next"].endswith("checkpoints/last.ckpt trainer.max_steps=16")
    parts = sorted(run.glob("wandb/offline-run-*"))
    assert len(parts) == 2
    assert parts[0].name.split("-")[-1] == parts[1].name.split("-")[-1]
    assert lines[""] == f"upload it: wandb sync {parts[0]} {parts[1]}"
    (file,) = parts[1].glob("*.wandb")
    assert read_wandb_file(file).config["resumed_from"] == {"path": str(last), "step": 4}

    before = (run / "report.html").read_bytes(), (run / "metrics.csv").read_bytes()
    with pytest.raises(ConfigError, match=r"max_steps is 8, .* has 8 steps .*Remedy: .*=16"):
        train(composed(run, *options, *resume))
    passes = [f"ckpt_path={last}", "trainer.max_steps=-1", "trainer.max_epochs=1"]
    with pytest.raises(ConfigError, match=r"max_epochs is 1, .* has 2 epochs .*Remedy: .*=4"):
        train(composed(run, *options, *passes))
    assert before == ((run / "report.html").read_bytes(), (run / "metrics.csv").read_bytes())


def read_rows(folder):
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("overrides", "kind", "message"),
    [
        (
            ["strategy.encoder_stages=4", "strategy.llm_stages=1"],
            ConfigError,
            r"encoder_stages=4 for a module of 3 layer\(s\)\. Limit: .*Remedy: ",
        ),
        (["ckpt_path=gone.ckpt"], ConfigError, r"ckpt_path is 'gone\.ckpt'.*Remedy: "),
        (["data.global_batch_size=1000"], DataError, r"Limit: at least one global batch of 1000"),
        (["data.assignment=best"], ConfigError, r"'best'\. Limit: one of .*fixed"),
    ],
)
def test_bad_input_is_refused_before_any_process_is_started(
    overrides, kind, message, environment, monkeypatch
):
    def refuse(*args, **kwargs):
        raise AssertionError("a process was started")

    monkeypatch.setattr("lightning_entrain.runtime.launcher.subprocess.Popen", refuse)
    with pytest.raises(Exception, match=message) as caught:
        train(composed(environment / "run", *QUICK, "logger=none", *overrides))
    error = caught.value
    assert isinstance(error, kind) or isinstance(error.__cause__, kind)


@pytest.mark.slow
def test_a_missing_data_folder_is_one_clear_message(launch, environment):
    done = launch("data=folder", "data.source.folder=nowhere", "hydra.run.dir=run")
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.strip()]
    assert line.startswith("Error: ")
    assert "nowhere" in line
    assert "Remedy: " in line


def test_what_hydra_refuses_ends_in_one_line(launch):
    done = launch("strategy.llm_stage=2")
    assert done.returncode == 1
    assert done.stderr.startswith("Error: There is no option 'strategy.llm_stage'. Remedy: ")
    assert "the nearest is strategy.llm_stages;" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("folder", "reason"), [("taken", "File exists"), ("/proc/x/y", "No such file")]
)
def test_a_run_folder_that_cannot_be_made_is_one_line(folder, reason, launch, environment):
    (environment / "taken").write_text("mine")
    done = launch(f"hydra.run.dir={folder}")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("Error: The run's folder ")
    assert reason in line
    assert "Remedy: set hydra.run.dir=DIR" in line
    assert (environment / "taken").read_text() == "mine"


def test_a_second_run_in_the_same_folder_is_refused(launch, environment):
    with run_folder(environment / "run"):
        before = sorted((environment / "run").rglob("*"))
        done = launch(*QUICK, f"hydra.run.dir={environment / 'run'}")
        assert sorted((environment / "run").rglob("*")) == before
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert f"in use by the run of process {os.getpid()} on " in line
    assert "Remedy: " in line


def test_devices_that_do_not_fit_the_stages_end_at_once(launch):
    done = launch("trainer.devices=3", "strategy.encoder_stages=1", "strategy.llm_stages=1")
    assert done.returncode == 1
    assert done.stderr.startswith("Error: 3 device(s) for 1 replica(s) x (1 encoder + 1 LLM)")
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_traceback_is_shown_on_request(launch):
    done = launch("trainer.devices=0", "debug=true")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "trainer.devices is 0" in done.stderr


def test_help_shows_how_to_start(launch):
    done = launch("--help")
    assert done.returncode == 0
    assert "entrain-train strategy=single" in done.stdout
    assert "max_steps: 48" in done.stdout
