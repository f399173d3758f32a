"""Checks of a composed config, before anything is started."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf

from lightning_entrain.config_option import check_range
from lightning_entrain.config_schemas import (
    EntrainStrategyConf,
    PlannedDataConf,
    SingleStrategyConf,
    TinyVlmConf,
    TrainConf,
)
from lightning_entrain.errors import ConfigError

if TYPE_CHECKING:
    from lightning_entrain.plan.layout import LayoutRequest


def validate(config: DictConfig, path: str = "") -> None:
    """Check every option of a composed config against its range.

    Args:
        config: The config; parts without a structured config are left to their own checks.
        path: Name of `config` in messages.

    Raises:
        ConfigError: For the first value out of range.
    """
    schema = OmegaConf.get_type(config)
    if is_dataclass(schema):
        for entry in fields(schema):
            if OmegaConf.is_missing(config, entry.name):
                raise ConfigError(
                    f"{path}{entry.name} is missing",
                    limit="it has no default",
                    remedy=f"set {path}{entry.name}=...",
                )
            if entry.metadata:
                check_range(f"{path}{entry.name}", config[entry.name], dict(entry.metadata))
    for key in config:
        name = str(key)
        if not OmegaConf.is_interpolation(config, name) and not OmegaConf.is_missing(config, name):
            value = config[name]
            if isinstance(value, DictConfig):
                validate(value, f"{path}{name}.")
    if not path and schema is TrainConf:
        num_devices(config)
        _check_fit(config)


def _check_fit(config: DictConfig) -> None:
    """Check what data, model and strategy ask of each other: later it would cost minutes."""
    from lightning_entrain.data.shape import BatchShape
    from lightning_entrain.plan.types import Supported
    from lightning_entrain.plan_file import read_plan

    strategy, data, model = config.strategy, config.data, config.model
    pipeline = OmegaConf.get_type(strategy) is EntrainStrategyConf
    plan = read_plan(strategy.plan) if pipeline and strategy.plan is not None else None
    if OmegaConf.get_type(data) is PlannedDataConf:
        shape = BatchShape(
            global_batch_size=data.global_batch_size,
            num_microbatches=plan.num_microbatches if plan else data.num_microbatches,
            micro_batch_size=None if plan else data.micro_batch_size,
        )
        shape.check_replicas(plan.dp if plan else strategy.replicas if pipeline else 1)
    if plan is not None:
        Supported().require(plan)
        plan.check_devices(num_processes(config))
    if not pipeline or OmegaConf.get_type(model) is not TinyVlmConf:
        return  # other models are checked when they are built
    layers = {"encoder_layers": model.encoder_layers, "llm_layers": model.llm_layers}
    if plan is not None:
        plan.check_layers(**layers)
        return
    _layout_request(strategy, num_processes(config)).check_depth(**layers)


DEFAULT_STAGES = 3
"""Stages of a replica if the options name neither them nor the processes: the fewest with which the
two modules can have unlike numbers."""


def num_devices(config: DictConfig) -> int:
    """Processes on each machine: as asked for, or as many as the layout needs.

    Args:
        config: A composed `TrainConf`.

    Raises:
        ConfigError: If devices, machines, replicas and stages do not fit each other.
    """
    return num_processes(config) // num_nodes(config)


def num_nodes(config: DictConfig) -> int:
    """Machines of a run, an option of the Trainer's own.

    Raises:
        ConfigError: If it is no number of machines.
    """
    found = config.trainer.extra.get("num_nodes", 1)
    if type(found) is not int or found < 1:
        raise ConfigError(
            f"trainer.extra.num_nodes is {found!r}", limit="a whole number of at least 1"
        )
    return found


def num_processes(config: DictConfig) -> int:
    """Processes of a run on all its machines.

    Args:
        config: A composed `TrainConf`.

    Raises:
        ConfigError: If devices, machines, replicas and stages do not fit each other.
    """
    strategy, devices, nodes = config.strategy, config.trainer.devices, num_nodes(config)
    schema = OmegaConf.get_type(strategy)
    if schema is SingleStrategyConf:
        if devices not in (None, 1) or nodes != 1:
            many = f"trainer.devices is {devices}" if nodes == 1 else f"num_nodes is {nodes}"
            raise ConfigError(
                f"{many} with strategy=single",
                limit="1 process",
                remedy="leave trainer.devices and num_nodes out, or set strategy=entrain",
            )
        return 1
    if schema is not EntrainStrategyConf:
        return int(devices or 1) * nodes
    if strategy.plan is not None:
        from lightning_entrain.plan_file import read_plan

        return _on_nodes(devices, nodes, read_plan(strategy.plan).num_gpus)
    named = strategy.encoder_stages, strategy.llm_stages
    stages = DEFAULT_STAGES if named == (None, None) else sum(count or 1 for count in named)
    found = _on_nodes(devices, nodes, strategy.replicas * stages)
    _layout_request(strategy, found).ranks_per_replica()
    return found


def _layout_request(strategy: DictConfig, world_size: int) -> LayoutRequest:
    """The layout that the options of a pipeline ask for."""
    from lightning_entrain.plan.layout import LayoutRequest

    return LayoutRequest(
        world_size=world_size,
        replicas=strategy.replicas,
        encoder_stages=strategy.encoder_stages,
        llm_stages=strategy.llm_stages,
        placement=strategy.placement,
    )


def _on_nodes(devices: int | None, nodes: int, needed: int) -> int:
    """Processes that were asked for, else as many as are needed, evenly on all machines."""
    if devices is not None:
        return int(devices) * nodes
    if needed % nodes:
        raise ConfigError(
            f"{needed} processes on trainer.extra.num_nodes={nodes} machines",
            limit="as many on each",
            remedy="set trainer.devices to the processes per machine",
        )
    return needed
