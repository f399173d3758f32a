"""The frame that the planning apps share: Hydra around it, one line for an error."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import hydra
from omegaconf import DictConfig

from lightning_entrain.conf_path import conf_dir
from lightning_entrain.errors import EntrainError


def run_app(name: str, job: Callable[[DictConfig], None]) -> None:
    """Run a job on the config of that name in conf/planning, with the command line's overrides."""
    folder = str(conf_dir() / "planning")
    hydra.main(version_base="1.3", config_path=folder, config_name=name)(job)()


@contextmanager
def one_line_errors(config: DictConfig) -> Iterator[None]:
    """End the program with one line for what the user can mend, unless debugging."""
    try:
        yield
    except EntrainError as error:
        if config.debug or os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        print(f"Error: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
