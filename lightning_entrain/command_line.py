"""The frame around every Hydra app: what Hydra itself refuses ends in one line, too."""

from __future__ import annotations

import difflib
import functools
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from lightning_entrain.errors import ConfigError

FULL_ERROR = "HYDRA_FULL_ERROR"
"""Environment variable; with 1, errors come with their tracebacks."""


def wants_traceback(config: DictConfig) -> bool:
    """Whether the user asked for tracebacks, by option or by Hydra's environment variable."""
    return bool(config.debug) or os.environ.get(FULL_ERROR) == "1"


def run_hydra(
    job: Callable[[DictConfig], None],
    *,
    folder: Path,
    name: str,
    program: str,
    options: Iterable[str],
    reference: str,
) -> None:
    """Run a job on a config composed from the command line.

    Args:
        job: Called with the config, once per job of a sweep.
        folder: Where the config lies.
        name: The config's name without its ending.
        program: The command's name, for messages.
        options: Dotted names of all options, to find the nearest to a wrong one.
        reference: The page that lists them.
    """
    if os.environ.get(FULL_ERROR) == "1":
        hydra.main(version_base="1.3", config_path=str(folder), config_name=name)(job)()
        return
    given = os.environ.get(FULL_ERROR)

    @functools.wraps(job)
    def started(config: DictConfig) -> None:
        _restore(given)
        job(config)

    # So told, Hydra raises what it would otherwise print on many lines.
    os.environ[FULL_ERROR] = "1"
    try:
        hydra.main(version_base="1.3", config_path=str(folder), config_name=name)(started)()
    except (HydraException, OmegaConfBaseException) as error:
        _end(explain(error, program=program, options=options, reference=reference))
    finally:
        _restore(given)


def option_names(schema: type, prefix: str = "") -> list[str]:
    """Dotted names of a structured config's options, those of nested ones included."""
    names = []
    for entry in fields(schema):
        name = prefix + entry.name
        names.append(name)
        nested: Any = entry.default_factory
        if isinstance(nested, type) and is_dataclass(nested):
            names += option_names(nested, f"{name}.")
    return names


def explain(
    error: Exception, *, program: str, options: Iterable[str], reference: str
) -> ConfigError:
    """What Hydra says about a command line, in one line and with the nearest name that exists.

    Args:
        error: Hydra's.
        program: The command's name.
        options: Dotted names of all options.
        reference: The page that lists them.
    """
    look = f"`{program} --help` lists all options, {reference} tells their meaning"
    first = str(error).split("\n", 1)[0].strip()
    if isinstance(error, OverrideParseException):
        return ConfigError(
            f"{error.override!r} cannot be read",
            limit="NAME=VALUE",
            remedy="quote values with spaces, commas or brackets: 'NAME=\"VALUE\"'",
        )
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, choice = str(error.missing_cfg_file).rpartition("/")
        choices = sorted(error.options or ())
        return ConfigError(
            f"{group or 'config'}={choice}: there is no such choice",
            limit=f"one of {', '.join(choices)}" if choices else "a config that exists",
            remedy=_nearest_text(choice, choices, prefix=f"{group}=") or look,
        )
    if first.startswith("Could not override '"):
        name = first.split("'")[1].split("@")[0]
        return ConfigError(
            f"There is no option {name!r}",
            remedy="; ".join(filter(None, (_nearest_text(name, options), look))),
        )
    if first.startswith("Error merging override "):
        reason = str(error.__cause__ or "").split("\n", 1)[0].strip()
        override = first.removeprefix("Error merging override ").replace("'", "")
        return ConfigError(f"{override}: {reason}", remedy=look)
    return ConfigError(first or type(error).__name__, remedy=look)


def _nearest_text(name: str, known: Iterable[str], prefix: str = "") -> str:
    found = nearest(name, known)
    return f"the nearest is {prefix}{found}" if found else ""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like another; None if none is. It may lack its group."""
    names: Sequence[str] = sorted(known)
    ends = [option for option in names if f"_{option.rpartition('.')[2]}".endswith(f"_{name}")]
    found = ends or difflib.get_close_matches(name, names, n=1)
    if not found:  # misspelt and without its group
        last = {option.rpartition(".")[2]: option for option in reversed(names)}
        found = [last[part] for part in difflib.get_close_matches(name, sorted(last), n=1)]
    return found[0] if found else None


def _restore(value: str | None) -> None:
    if value is None:
        os.environ.pop(FULL_ERROR, None)
    else:
        os.environ[FULL_ERROR] = value


def _end(error: Exception) -> NoReturn:
    print(f"Error: {error}", file=sys.stderr, flush=True)
    sys.exit(1)
