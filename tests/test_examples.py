"""What README, docs and examples show works as shown."""

import importlib.util
import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from hydra import compose, initialize_config_dir

from lightning_entrain.conf_path import conf_dir
from lightning_entrain.config import num_devices, register_configs, validate
from lightning_entrain.strategy import EntrainStrategy

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
INSTALL = 'pip install -c constraints.txt -e ".[demo,test]"'


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


def shown(*apps):
    lines = (
        line for page in PAGES for block in blocks(page, "bash") for line in block.splitlines()
    )
    return sorted({line.split("  #")[0].strip() for line in lines if line.startswith(apps)})


COMMANDS = shown("entrain-train")
PLANNING_COMMANDS = shown("entrain-plan", "entrain-simulate", "entrain-profile")


def load_example():
    path = ROOT / "examples" / "train_vlm.py"
    spec = importlib.util.spec_from_file_location("train_vlm_example", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # inspect looks the source up there
    spec.loader.exec_module(module)
    return module


def test_the_first_screen_has_the_two_commands():
    """Each is one line, starts from nothing and ends with the job or the tests."""
    first, second = blocks(ROOT / "README.md", "bash")[:2]
    start = f"python3 -m venv .venv && . .venv/bin/activate && {INSTALL} && "
    assert first == f"{start}entrain-train\n"
    assert second == f"{start}pytest\n"
    assert (ROOT / "README.md").read_text().index(second) < 1500


def test_ci_runs_the_readmes_command():
    """CI takes the line from the README; its pattern matches that one line alone."""
    script = (ROOT / ".ci" / "run").read_text()
    pattern = re.search(r"grep -m 1 -E '(.*?)' README\.md", script).group(1)
    matches = [
        line for line in (ROOT / "README.md").read_text().splitlines() if re.search(pattern, line)
    ]
    assert matches == blocks(ROOT / "README.md", "bash")[1].splitlines()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_shown_composes_and_validates(command):
    arguments = shlex.split(command)[1:]
    overrides = [text for text in arguments if not text.startswith("-")]
    if "-m" in arguments:  # a sweep: its first job
        overrides = [text.split(",")[0] for text in overrides]
    register_configs()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = compose("train", overrides=["run_dir=.", *overrides])
    validate(config)
    assert num_devices(config) >= 1


@pytest.mark.parametrize("command", PLANNING_COMMANDS)
def test_every_planning_command_shown_composes(command):
    app, *overrides = shlex.split(command)
    name = app.removeprefix("entrain-")
    module = importlib.import_module(f"lightning_entrain.{name}_app")
    module.register_configs()
    with initialize_config_dir(str(conf_dir() / "planning"), version_base="1.3"):
        compose(name, overrides=[text for text in overrides if not text.startswith("-")])


def test_there_are_commands_to_test():
    assert len(COMMANDS) >= 10
    assert len(PLANNING_COMMANDS) >= 5


def test_links_in_the_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(((?!http)[^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_readmes_module_is_the_examples():
    (snippet,) = blocks(ROOT / "README.md", "python")
    assert snippet.strip() == inspect.getsource(load_example().ChartReader).strip()


def test_the_example_trains_and_its_module_needs_no_strategy(tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_ENTRAIN_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    example = load_example()
    charts = example.ChartSource
    monkeypatch.setattr(example, "ChartSource", lambda n: charts(n, max_side=300, progress=False))
    trainer = example.main(devices=1, num_charts=24, max_steps=6)
    assert isinstance(trainer.strategy, EntrainStrategy)
    assert trainer.global_step == 6
    assert float(trainer.callback_metrics["train/loss"]) < 6.0

    plain = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=6,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    pl.seed_everything(0)
    plain.fit(example.ChartReader(trainer.datamodule.tokenizer), datamodule=trainer.datamodule)
    found = float(plain.callback_metrics["train/loss"])
    assert found == pytest.approx(float(trainer.callback_metrics["train/loss"]), rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_example_runs_as_a_script_on_two_processes(tmp_path):
    script = ROOT / "examples" / "train_vlm.py"
    done = subprocess.run(
        [sys.executable, script, "2", "24", "2"],
        cwd=tmp_path,
        env={**os.environ, "LIGHTNING_ENTRAIN_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    assert torch.load(checkpoint, weights_only=False)["global_step"] == 2


def test_the_pages_name_no_machine_and_no_registry():
    pattern = re.compile(r"/(work|opt|root|home)/|pypi\.org|index-url|download\.pytorch\.org")
    for page in [*PAGES, ROOT / "CHANGELOG.md", ROOT / "constraints.txt", ROOT / ".ci" / "run"]:
        assert not pattern.search(page.read_text()), page.name


def test_this_python_is_one_the_readme_names():
    low, high = re.search(r"Python 3\.(\d+) to 3\.(\d+)", (ROOT / "README.md").read_text()).groups()
    text = (ROOT / "pyproject.toml").read_text()
    assert f'requires-python = ">=3.{low},<3.{int(high) + 1}"' in text
    assert int(low) <= sys.version_info.minor <= int(high)
