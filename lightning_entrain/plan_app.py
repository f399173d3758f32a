"""The app `entrain-plan`: a parallel plan on a laptop, before a cluster is rented."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from lightning_entrain.errors import ConfigError, DataError
from lightning_entrain.output_file import check_file, write_whole
from lightning_entrain.plan.planner import BMinOptions, PlanReport, make_plan
from lightning_entrain.plan.request import PlanRequest
from lightning_entrain.plan.search import Evaluate
from lightning_entrain.plan.types import ParallelPlan, Supported
from lightning_entrain.planning_app import one_line_errors, run_app
from lightning_entrain.workload.costs import CostModel
from lightning_entrain.workload.datasets import raw_sizes
from lightning_entrain.workload.hardware import Cluster, device
from lightning_entrain.workload.hf_config import model_shape
from lightning_entrain.workload.measured import MeasuredCostModel, Profile
from lightning_entrain.workload.memory import Training
from lightning_entrain.workload.roofline import AnalyticCostModel
from lightning_entrain.workload.shapes import ModelShape
from lightning_entrain.workload.tables import SizeTable
from lightning_entrain.workload.vision_rules import table_from_raw


@dataclass
class ClusterConf:
    """The machine."""

    gpu: str = "a100-80"
    num_gpus: int = 8
    gpus_per_node: int = 8
    link_gbps: float | None = None
    network_gbps: float = 25.0


@dataclass
class DataConf:
    """The sizes of the samples."""

    name: str = "llava150k"
    num_samples: int = 20000
    seed: int = 0
    sizes: str | None = None


@dataclass
class TrainingConf:
    """What is trained and how; see :class:`lightning_entrain.workload.memory.Training`."""

    encoder: str = "full"
    projector: str = "full"
    llm: str = "full"
    lora_rank: int = 16
    precision: str = "bf16-mixed"
    optimizer: str = "adamw"
    recompute: bool = False


@dataclass
class BMinConf:
    """Algorithm 1 and the table of splits per batch size."""

    alpha: float = 0.05
    p_error: float = 0.05
    max_batch: int = 8192
    seed: int = 0
    batch_sizes: list[int] = field(default_factory=lambda: [1, 4, 16, 64, 256])
    trials: int | None = None


@dataclass
class PlanConf:
    """All options of `entrain-plan`; `docs/planning.md` tells their meaning."""

    model: dict[str, Any] = field(default_factory=dict)
    data: DataConf = field(default_factory=DataConf)
    cluster: ClusterConf = field(default_factory=ClusterConf)
    training: TrainingConf = field(default_factory=TrainingConf)
    b_min: BMinConf = field(default_factory=BMinConf)
    global_batch_size: int = 512
    dp: int | None = None
    encoder_tp: int | None = None
    llm_tp: int | None = None
    encoder_stages: int | None = None
    llm_stages: int | None = None
    microbatch_sizes: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16])
    deferral: bool = True
    extra_warmup: int = 0
    runnable_only: bool = False
    num_best: int = 6
    simulate: bool = False
    profile: str | None = None
    allow_other_device: bool = False
    output: str | None = "plan.json"
    debug: bool = False


def register_configs() -> None:
    """Make the options' names and types known to Hydra."""
    ConfigStore.instance().store(name="plan_schema", node=PlanConf)


def main() -> None:
    """Entry point of `entrain-plan`."""
    register_configs()
    run_app("plan", _job, PlanConf)


def _job(config: DictConfig) -> None:
    with one_line_errors(config):
        output = check_file(config.output) if config.output else None
        choices = HydraConfig.get().runtime.choices
        report = make_report(config, names={key: str(choices.get(key)) for key in _GROUPS})
        if output:
            write_plan(output, report.plan)
    from lightning_entrain.plan_report import print_report

    print_report(report, output=config.output)


_GROUPS = ("model", "data", "cluster")


def write_plan(path: Path, plan: ParallelPlan) -> None:
    """Write a plan whole or not at all.

    Raises:
        DataError: If the file cannot be written.
    """
    write_whole(path, plan.to_json())


def make_report(
    config: DictConfig | PlanConf,
    *,
    names: dict[str, str] | None = None,
    supported: Supported | None = None,
    evaluate: Evaluate | None = None,
) -> PlanReport:
    """Plan for a composed configuration.

    Args:
        config: The options.
        names: Names of the chosen model, data and cluster, for the tables.
        supported: What the runtime can do; None for what it can do now.
        evaluate: Predicts the step time of the best few plans, e.g. by simulation.

    Raises:
        EntrainError: If an option cannot be used or nothing fits.
    """
    names = names or {}
    plain: Any = config if isinstance(config, DictConfig) else OmegaConf.structured(config)
    request = make_request(plain, names=names)
    if plain.num_best < 1:
        raise ConfigError(f"num_best is {plain.num_best}", limit="at least 1")
    if plain.simulate and evaluate is None:
        from lightning_entrain.simulation.objective import plan_evaluator

        evaluate = plan_evaluator(request)
    conf = _plain_dict(plain.b_min)
    return make_plan(
        request,
        supported=supported or Supported(),
        runnable_only=plain.runnable_only,
        evaluate=evaluate,
        num_best=plain.num_best,
        options=BMinOptions(**{**conf, "batch_sizes": tuple(conf["batch_sizes"])}),
        names=names,
    )


def make_request(config: Any, *, names: Mapping[str, str] | None = None) -> PlanRequest:
    """What a composed configuration asks to plan for.

    Args:
        config: The options.
        names: Names of the chosen model, data and cluster.

    Raises:
        EntrainError: If an option cannot be used.
    """
    model = model_shape(_plain_dict(config.model), name=(names or {}).get("model", ""))
    cluster = _cluster(config.cluster)
    training = Training(**_plain_dict(config.training))
    return PlanRequest(
        model=model,
        table=load_table(config.data, model),
        cluster=cluster,
        cost_model=load_cost_model(config, cluster, training),
        training=training,
        global_batch_size=config.global_batch_size,
        dp=config.dp,
        encoder_tp=config.encoder_tp,
        llm_tp=config.llm_tp,
        encoder_stages=config.encoder_stages,
        llm_stages=config.llm_stages,
        microbatch_sizes=_microbatch_sizes(config.microbatch_sizes),
        deferral=config.deferral,
        extra_warmup=config.extra_warmup,
    )


def load_table(data: Any, model: ModelShape) -> SizeTable:
    """Sizes of the chosen data under the model's image rule.

    Raises:
        EntrainError: If the data cannot be used, or holds nothing to work on.
    """
    if data.sizes:
        from lightning_entrain.sizes_file import read_sizes

        table = read_sizes(data.sizes, model.view_rule)
        if not table.num_tokens.any():
            raise ConfigError(
                f"All {len(table)} samples of {data.sizes} have 0 tokens",
                limit="some work to simulate and to share the GPUs by",
                remedy="correct data.sizes",
            )
        return table
    return table_from_raw(raw_sizes(data.name, data.num_samples, data.seed), model.view_rule)


def load_cost_model(config: Any, cluster: Cluster, training: Training) -> CostModel:
    """The measured model if a profile is given, else the analytic one."""
    if not config.profile:
        return AnalyticCostModel(device=cluster.device, link_gbps=cluster.link_gbps)
    path = Path(config.profile)
    if not path.is_file():
        raise DataError(f"profile is {config.profile!r}, which is not a file")
    profile = Profile.from_json(path.read_text())
    profile.require(
        device=cluster.device.name, dtype=training.dtype, allow_other=config.allow_other_device
    )
    return MeasuredCostModel(profile)


def _cluster(conf: Any) -> Cluster:
    if conf.gpu == "cpu":
        from lightning_entrain.this_cpu import this_cpu

        gpu = this_cpu()
    else:
        gpu = device(conf.gpu)
    return Cluster(
        device=gpu,
        num_gpus=conf.num_gpus,
        gpus_per_node=min(conf.gpus_per_node, conf.num_gpus),
        link_gbps=gpu.link_gbps if conf.link_gbps is None else conf.link_gbps,
        network_gbps=conf.network_gbps,
    )


def _microbatch_sizes(values: Any) -> tuple[int, ...]:
    sizes = tuple(int(value) for value in values)
    if not sizes or min(sizes) < 1:
        raise ConfigError(f"microbatch_sizes is {list(sizes)}", limit="at least one, each above 0")
    return sizes


def _plain_dict(config: Any) -> dict[str, Any]:
    value = OmegaConf.to_container(config, resolve=True)
    assert isinstance(value, dict)
    return {str(key): item for key, item in value.items()}


if __name__ == "__main__":
    main()
