"""The package works from a clone and from a wheel, configs included."""

import ast
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from lightning_entrain.conf_path import conf_dir
from lightning_entrain.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "conf").rglob("*.yaml"))


def run(command, **options):
    return subprocess.run(command, capture_output=True, text=True, check=True, **options)


def project_table():
    tomllib = pytest.importorskip("tomllib", reason="comes with Python 3.11")
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], cwd=ROOT)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The wheel unpacked as pip would, and the environment to use it alone."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}, folder


def test_the_wheel_holds_the_configs_and_the_type_marker_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    found = sorted(name for name in names if name.endswith(".yaml"))
    assert found == [f"lightning_entrain/{name}" for name in CONFIGS]
    assert len(CONFIGS) >= 10
    assert "lightning_entrain/py.typed" in names
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"lightning_entrain"}
    sources = {str(path.relative_to(ROOT)) for path in ROOT.glob("lightning_entrain/**/*.py")}
    assert sources <= set(names)


def test_every_package_that_is_imported_is_declared():
    project = project_table()
    extras = project["optional-dependencies"].values()
    wanted = [*project["dependencies"], *(text for extra in extras for text in extra)]
    declared = {re.split(r"[^A-Za-z0-9_-]", text)[0].replace("-", "_") for text in wanted}
    imported = set()
    for path in (ROOT / "lightning_entrain").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(node.module.split(".")[0])
    others = imported - sys.stdlib_module_names - {"lightning_entrain", "__main__"}
    named = {"hydra": "hydra_core", "PIL": "pillow"}
    assert {named.get(name, name) for name in others} <= declared


def test_every_command_of_the_project_points_at_a_function(installed):
    scripts = project_table()["scripts"]
    environment, folder = installed
    assert scripts
    for target in scripts.values():
        module, function = target.split(":")
        code = f"import {module} as m; print(m.__file__, callable(m.{function}))"
        text = run([sys.executable, "-c", code], env=environment, cwd=folder).stdout
        assert text.startswith(str(folder))
        assert text.endswith("True\n")


def test_the_installed_wheel_composes_its_own_configs(installed, tmp_path):
    environment, folder = installed
    code = "from lightning_entrain.conf_path import conf_dir; print(conf_dir())"
    found = run([sys.executable, "-c", code], env=environment, cwd=tmp_path).stdout.strip()
    assert found == str(folder / "lightning_entrain" / "conf")
    command = [sys.executable, "-m", "lightning_entrain.train", "--cfg", "job", "experiment=quick"]
    text = run(command, env=environment, cwd=tmp_path).stdout
    assert "max_steps: 12" in text
    assert not list(tmp_path.iterdir())


def test_a_clone_uses_its_own_conf_folder():
    assert conf_dir() == ROOT / "conf"


def test_a_clone_comes_before_a_copy_inside_the_package(tmp_path):
    package = tmp_path / "lightning_entrain"
    for folder in (package / "conf", tmp_path / "conf"):
        folder.mkdir(parents=True)
        (folder / "train.yaml").touch()
    assert conf_dir(package) == package / "conf"
    (tmp_path / "pyproject.toml").touch()
    assert conf_dir(package) == tmp_path / "conf"


def test_missing_configs_are_one_clear_error(tmp_path):
    with pytest.raises(ConfigError, match=r"No configs found in .* Remedy: install it again"):
        conf_dir(tmp_path / "lightning_entrain")


def test_importing_the_package_is_quick_and_brings_no_torch():
    code = "import sys, lightning_entrain; print('torch' in sys.modules)"
    assert run([sys.executable, "-X", "importtime", "-c", code]).stdout == "False\n"


def test_pinned_versions_cover_what_the_project_asks_for():
    from packaging.requirements import Requirement

    project = project_table()
    wanted = project["dependencies"] + [
        name for extra in ("demo", "test") for name in project["optional-dependencies"][extra]
    ]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {}
    for line in lines:
        if not line.startswith("#"):
            pin = Requirement(line)
            pins[pin.name.replace("_", "-").lower()] = next(iter(pin.specifier)).version
    for text in wanted:
        need = Requirement(text)
        name = need.name.replace("_", "-").lower()
        assert name in pins, f"constraints.txt does not pin {name}"
        assert need.specifier.contains(pins[name]), f"{text} excludes {pins[name]}"


def test_nothing_is_skipped_for_a_package_that_ci_could_install():
    """What tests skip without comes with the extras that the README's command installs."""
    from packaging.requirements import Requirement

    project = project_table()
    brought = {
        Requirement(text).name.replace("-", "_").lower()
        for text in project["dependencies"]
        + [n for extra in ("demo", "test") for n in project["optional-dependencies"][extra]]
    }
    pattern = re.compile(r"importorskip\(\s*\"(\w+)\"")
    asked = {
        name
        for path in (ROOT / "tests").rglob("*.py")
        for name in pattern.findall(path.read_text())
    }
    assert {"tensorboard", "wandb_workspaces"} <= asked
    assert asked - set(sys.stdlib_module_names) - {"benchmarks"} <= brought
