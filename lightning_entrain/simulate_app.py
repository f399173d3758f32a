"""The app `entrain-simulate`: what would each policy gain on my data?"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_entrain.errors import ConfigError
from lightning_entrain.observe.chrome_trace import chrome_trace
from lightning_entrain.observe.report import report_page
from lightning_entrain.output_file import check_folder, write_whole
from lightning_entrain.plan_app import ClusterConf, DataConf, TrainingConf, make_request
from lightning_entrain.plan_file import read_plan
from lightning_entrain.planning_app import one_line_errors, run_app
from lightning_entrain.simulation.inputs import PolicyOptions
from lightning_entrain.simulation.setting import Comparison, SimulationSetting, compare


@dataclass
class PolicyConf:
    """How one policy is run; see :class:`lightning_entrain.simulation.inputs.PolicyOptions`."""

    policy: str = "joint"
    schedule: str = "1f1b"
    max_lag: int = 0
    limit_by_heaviest: bool = True
    num_microbatches: Any = None
    ramp: bool = False
    num_groups: int = 2
    num_steps: int = 1000
    template_steps: int = 100_000
    stages: str | None = None


@dataclass
class StrategyConf:
    """The layout."""

    plan: str | None = None
    placement: str = "one_per_rank"
    stage_choice: str = "bottleneck"


@dataclass
class SimulateConf:
    """All options of `entrain-simulate`; `docs/simulation.md` tells their meaning."""

    model: dict[str, Any] = field(default_factory=dict)
    data: DataConf = field(default_factory=DataConf)
    cluster: ClusterConf = field(default_factory=ClusterConf)
    training: TrainingConf = field(default_factory=TrainingConf)
    strategy: StrategyConf = field(default_factory=StrategyConf)
    policies: list[str] = field(default_factory=list)
    policy_options: dict[str, Any] = field(default_factory=dict)  # PolicyConf by name
    baseline: str | None = None
    seed: int = 0
    num_batches: int = 8
    costs: str = "flops"
    communication: bool = False
    latency_us: float = 10.0
    overhead: float = 0.0
    max_live: float | None = None
    memory_gib: float | None = None
    global_batch_size: int = 512
    dp: int | None = None
    encoder_tp: int | None = None
    llm_tp: int | None = None
    encoder_stages: int | None = None
    llm_stages: int | None = None
    microbatch_sizes: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16])
    deferral: bool = True
    extra_warmup: int = 0
    profile: str | None = None
    allow_other_device: bool = False
    output: str = "."
    debug: bool = False


def register_configs() -> None:
    """Make the options' names and types known to Hydra."""
    ConfigStore.instance().store(name="simulate_schema", node=SimulateConf)


def main() -> None:
    """Entry point of `entrain-simulate`."""
    register_configs()
    run_app("simulate", _job, SimulateConf, reference="simulation")


_GROUPS = ("model", "data", "cluster")


def _job(config: DictConfig) -> None:
    with one_line_errors(config):
        output = check_folder(config.output)
        choices = HydraConfig.get().runtime.choices
        found = make_comparison(config, names={key: str(choices.get(key)) for key in _GROUPS})
        files = write_files(output, found)
    from lightning_entrain.simulate_report import print_comparison

    print_comparison(found, files=files)


def make_comparison(config: Any, *, names: Mapping[str, str] | None = None) -> Comparison:
    """Simulate the policies of a composed configuration.

    Args:
        config: The options, a :class:`SimulateConf` or as composed by Hydra.
        names: Names of the chosen model, data and cluster.

    Raises:
        EntrainError: If an option cannot be used, or nothing fits the memory.
    """
    names = names or {}
    plain = config if isinstance(config, DictConfig) else OmegaConf.structured(config)
    # Before the samples are read: a misspelt policy should not cost time.
    policies = [_policy(name, plain.policy_options) for name in plain.policies]
    plan = read_plan(plain.strategy.plan) if plain.strategy.plan else None
    setting = SimulationSetting(
        request=make_request(plain, names=names),
        plan=plan,
        placement=plain.strategy.placement,
        stage_choice=plain.strategy.stage_choice,
        costs=plain.costs,
        communication=plain.communication,
        latency_us=plain.latency_us,
        overhead=plain.overhead,
        max_live=plain.max_live,
        memory_gib=plain.memory_gib,
        num_batches=plain.num_batches,
        seed=plain.seed,
    )
    return compare(
        setting,
        policies,
        baseline=plain.baseline,
        described={
            name: OmegaConf.to_container(plain.policy_options[name], resolve=True)
            for name in plain.policies
        },
        data=plain.data.sizes or names.get("data") or plain.data.name,
    )


def _policy(name: str, options: Any) -> tuple[str, str, PolicyOptions]:
    if name not in options:
        raise ConfigError(
            f"policy {name!r}",
            limit=f"some of {', '.join(options)}",
            remedy=f"correct policies, or add it: +policy_options.{name}.policy=joint",
        )
    try:
        whole = OmegaConf.merge(OmegaConf.structured(PolicyConf), options[name])
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"policy_options.{name}: {str(error).splitlines()[0]}",
            limit=f"options are {', '.join(field.name for field in fields(PolicyConf))}",
        ) from error
    chosen: dict[str, Any] = {str(key): value for key, value in whole.items()}
    policy = chosen.pop("policy")
    counts = chosen["num_microbatches"]
    try:
        chosen["num_microbatches"] = (
            tuple(int(count) for count in counts)
            if isinstance(counts, list | ListConfig)
            else None
            if counts is None
            else int(counts)
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"policy_options.{name}.num_microbatches is {counts!r}",
            limit="a number, a list of numbers, or null for the plan's",
        ) from error
    made = PolicyOptions(**chosen)
    made.check(policy)
    return name, policy, made


def write_files(folder: Path, found: Comparison) -> tuple[Path, ...]:
    """Write `simulation.json`, `report.html` and a Chrome trace per policy, each whole or not.

    Returns:
        What was written.

    Raises:
        DataError: If a file cannot be written.
    """
    texts = {
        "simulation.json": json.dumps(found.to_json(), indent=2) + "\n",
        "report.html": report_page(found),
    }
    for name, result in zip(found.names, found.results, strict=True):
        trace = chrome_trace(result.timelines, name=name)
        texts[f"trace_{name}.json"] = json.dumps(trace, separators=(",", ":")) + "\n"
    folder = check_folder(folder)
    paths = []
    for file, text in texts.items():
        path = folder / file
        write_whole(path, text)
        paths.append(path)
    return tuple(paths)


if __name__ == "__main__":
    main()
