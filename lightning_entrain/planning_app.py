"""The frame that the planning apps share: Hydra around it, one line for an error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from omegaconf import DictConfig

from lightning_entrain.command_line import option_names, run_hydra, wants_traceback
from lightning_entrain.conf_path import conf_dir
from lightning_entrain.errors import EntrainError


def run_app(
    name: str, job: Callable[[DictConfig], None], schema: type, *, reference: str = "planning"
) -> None:
    """Run a job on the config of that name in conf/planning, with the command line's overrides.

    Args:
        name: The config's, and behind ``entrain-`` the command's.
        job: Called with the composed config.
        schema: The config's structure.
        reference: Page of docs/ that lists the options.
    """
    run_hydra(
        job,
        folder=conf_dir() / "planning",
        name=name,
        program=f"entrain-{name}",
        options=option_names(schema),
        reference=f"docs/{reference}.md",
    )


@contextmanager
def one_line_errors(config: DictConfig) -> Iterator[None]:
    """End the program with one line for what the user can mend, unless debugging."""
    try:
        yield
    except EntrainError as error:
        if wants_traceback(config):
            raise
        print(f"Error: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
