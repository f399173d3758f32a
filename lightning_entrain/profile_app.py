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
from lightning_entrain.profile_estimate import duration_text, estimated_seconds, num_points
from lightning_entrain.workload.hf_config import model_shape

if TYPE_CHECKING:
    from lightning_entrain.workload.measured import Fit, Profile
    from lightning_entrain.workload.shapes import ModelShape


@dataclass
class ProfileConf:
    """All options of `entrain-profile`; `docs/planning.md` tells their meaning."""

    model: dict[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    dtype: str = "float32"
    sizes: list[int] | None = None
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

    from lightning_entrain.data.progress import progress_bar
    from lightning_entrain.profiling import check_options, default_sizes, profile_model

    if config.threads is not None:
        torch.set_num_threads(config.threads)
    model: Any = OmegaConf.to_container(config.model, resolve=True)
    sizes = default_sizes(config.device) if config.sizes is None else tuple(config.sizes)
    check_options(config.device, config.dtype, sizes)
    shape = model_shape(model, name=name)
    _announce(shape, config, sizes)
    with progress_bar("Timing layers", num_points(shape, sizes)) as advance:
        return profile_model(
            model,
            name=name,
            device=config.device,
            dtype=config.dtype,
            sizes=sizes,
            seconds_per_point=config.seconds_per_point,
            clock=time.process_time if config.cpu_time else time.perf_counter,
            advance=advance,
        )


def _announce(shape: ModelShape, config: DictConfig, sizes: tuple[int, ...]) -> None:
    """Tell what is timed and about how long it takes."""
    from lightning_entrain.planning import named_device
    from lightning_entrain.this_cpu import this_cpu

    place = this_cpu() if config.device.startswith("cpu") else named_device(config.device)
    seconds = estimated_seconds(shape, place, sizes, config.seconds_per_point)
    print(
        f"{num_points(shape, sizes)} timings, of {min(sizes):,} to {max(sizes):,} rows, take about "
        f"{duration_text(seconds)}; smaller sizes=[...] or seconds_per_point= shorten it.",
        file=sys.stderr,
        flush=True,
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
