"""The app `entrain-profile`: times the real layers on this device for the measured cost model."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from lightning_entrain.errors import ConfigError
from lightning_entrain.output_file import check_file, write_whole
from lightning_entrain.planning_app import one_line_errors, run_app

if TYPE_CHECKING:
    from lightning_entrain.workload.measured import Fit, Profile


@dataclass
class ProfileConf:
    """All options of `entrain-profile`; `docs/planning.md` tells their meaning."""

    model: dict[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    dtype: str = "float32"
    sizes: list[int] = field(default_factory=lambda: [64, 256, 1024, 4096, 16384])
    seconds_per_point: float = 1.0
    threads: int | None = None
    cpu_time: bool = False
    output: str = "profile.json"
    debug: bool = False


def register_configs() -> None:
    """Make the options' names and types known to Hydra."""
    ConfigStore.instance().store(name="profile_schema", node=ProfileConf)


def main() -> None:
    """Entry point of `entrain-profile`."""
    register_configs()
    run_app("profile", _job, ProfileConf)


def _job(config: DictConfig) -> None:
    with one_line_errors(config):
        output = check_file(config.output)
        profile = run_profile(config, name=str(HydraConfig.get().runtime.choices.get("model")))
        write_profile(output, profile)
    print_profile(profile, output)


def run_profile(config: DictConfig, *, name: str = "") -> Profile:
    """Measure as configured.

    Args:
        config: Options as in :class:`ProfileConf`.
        name: Name of the model.

    Raises:
        ConfigError: If an option cannot be used.
    """
    if not config.seconds_per_point > 0:
        raise ConfigError(f"seconds_per_point is {config.seconds_per_point}", limit="above 0")
    if config.threads is not None and config.threads < 1:
        raise ConfigError(f"threads is {config.threads}", limit="at least 1")
    if config.cpu_time and (config.device != "cpu" or config.threads != 1):
        raise ConfigError(
            f"cpu_time is true with device {config.device} and threads {config.threads}",
            limit="processor time is the work's time on one CPU thread alone",
            remedy="set threads=1 and device=cpu, or cpu_time=false",
        )
    import torch

    from lightning_entrain.profiling import profile_model

    if config.threads is not None:
        torch.set_num_threads(config.threads)
    model: Any = OmegaConf.to_container(config.model, resolve=True)
    return profile_model(
        model,
        name=name,
        device=config.device,
        dtype=config.dtype,
        sizes=tuple(config.sizes),
        seconds_per_point=config.seconds_per_point,
        clock=time.process_time if config.cpu_time else time.perf_counter,
        report=lambda item: print(f"{item.kind}: done", file=sys.stderr, flush=True),
    )


def write_profile(path: Path, profile: Profile) -> None:
    """Write a profile whole or not at all.

    Raises:
        DataError: If the file cannot be written.
    """
    write_whole(path, profile.to_json())


def print_profile(profile: Profile, path: Path, console: Console | None = None) -> None:
    """Print each layer's fit and how well it holds."""
    console = console or Console(width=None if sys.stdout.isatty() else 120)
    grid = Table(
        title=f"{profile.model} on {profile.device}, {profile.dtype}", title_justify="left"
    )
    for name in ("layer", "ms at", "forward", "backward", "fit error", "spread"):
        grid.add_column(name, justify="left" if name == "layer" else "right")
    for item in profile.layers:
        largest = max(item.measurements, key=lambda entry: entry.rows)
        grid.add_row(
            item.kind,
            f"{largest.rows:,} rows",
            f"{largest.forward_ms:.2f}",
            f"{largest.backward_ms:.2f}",
            f"{100 * _worst(item.forward, item.backward):.0f} %",
            f"{100 * max(entry.spread for entry in item.measurements):.0f} %",
        )
    console.print(grid)
    console.print(f"Profile written to {path}; use it with entrain-plan profile={path}")


def _worst(*fits: Fit) -> float:
    return max(fit.residual for fit in fits)


if __name__ == "__main__":
    main()
