"""Runs Lightning's own tests with EntrainStrategy in its one-stage mode.

Needs a checkout of Lightning at the version that is installed, and its test requirements:

    git clone --depth 1 --branch 2.6.6 https://github.com/Lightning-AI/pytorch-lightning
    python -m tests.conformance.run pytorch-lightning

Further arguments go to pytest. Exits with pytest's code.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FILES = (
    "models/test_hooks.py",
    "loops/test_training_loop.py",
    "loops/test_evaluation_loop.py",
    "trainer/optimization/test_optimizers.py",
    "trainer/optimization/test_manual_optimization.py",
    "trainer/connectors/test_checkpoint_connector.py",
    "callbacks/test_early_stopping.py",
    "callbacks/test_lr_monitor.py",
)


def main(checkout: Path, *options: str) -> int:
    """Run the files above from a checkout."""
    tests = checkout.resolve() / "tests"
    files = [tests / "tests_pytorch" / name for name in FILES]
    present = [str(file) for file in files if file.exists()]
    if not present:
        print(f"{tests / 'tests_pytorch'} holds none of the files to run", file=sys.stderr)
        return 2
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), str(tests), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-p", "tests.conformance.plugin", "-rfx"]
    # The checkout's `tests` folder is not a package: ours keeps the name.
    command += ["--import-mode=importlib", f"--rootdir={tests}", *present, *options]
    return subprocess.run(command, cwd=checkout, env={**os.environ, "PYTHONPATH": path}).returncode


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
