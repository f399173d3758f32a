"""The options of the apps: structured configs for Hydra, each with its range and meaning.

OmegaConf checks names and types when a config is composed; `validate` then checks ranges. The same
fields generate docs/configuration.md (see `config_reference.py`).
"""

# ruff: noqa: RUF009 - `option` returns a dataclass field

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from lightning_entrain.errors import ConfigError


def option(
    default: Any,
    meaning: str,
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    choices: tuple[str, ...] | None = None,
) -> Any:
    """A field of a config, with what `validate` and the reference need.

    Args:
        default: Value where the user gives none; a list or a dictionary is copied.
        meaning: One sentence for people, with the unit.
        minimum: Least value allowed.
        above: Value that must be exceeded.
        maximum: Greatest value allowed.
        choices: The only values allowed.
    """
    metadata = {
        "meaning": meaning,
        "minimum": minimum,
        "above": above,
        "maximum": maximum,
        "choices": choices,
    }
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class PlannedDataConf:
    """Planned global batches of a source's samples."""

    _target_: str = "lightning_entrain.datamodule.EntrainDataModule"
    source: Any = field(default=MISSING, metadata={"meaning": "Group: where samples come from."})
    global_batch_size: int = option(16, "Samples per batch, over all replicas.", minimum=1)
    num_microbatches: int | None = option(
        4, "Microbatches per replica; null where micro_batch_size is given.", minimum=1
    )
    micro_batch_size: int | None = option(
        None, "Samples per microbatch, instead of num_microbatches.", minimum=1
    )
    assignment: str = option(
        "${assignment}",
        "Policy that assigns samples to microbatches.",
        choices=("fixed", "disttrain", "dip", "entrain", "joint"),
    )
    max_lag: int | None = option(
        None,
        "1 lets a sample's LLM work lag by one microbatch, 0 forbids it; null: 1 for entrain.",
        minimum=0,
        maximum=1,
    )
    seed: int = option("${seed}", "Seed of the samples' order.", minimum=0, maximum=2**32 - 1)
    shuffle: bool = option(True, "Shuffle the training samples every epoch.")
    val_fraction: float = option(0.1, "Share of samples for validation.", minimum=0, maximum=0.9)
    test_fraction: float = option(0.0, "Share of samples for testing.", minimum=0, maximum=0.9)
    vocab_size: int = option(1024, "Most ids of the tokenizer trained on the source.", minimum=260)
    max_tokens: int = option(8192, "Longest sample, vision and text tokens.", minimum=1)
    min_pixels: int = option(56 * 56, "Least area of an image after resizing.", minimum=1)
    max_pixels: int = option(28 * 28 * 1280, "Largest area of an image after resizing.", minimum=1)
    patch_size: int = option(14, "Side of a patch, pixels.", minimum=1)
    merge_size: int = option(
        2, "Side, in patches, of the square that becomes one vision token.", minimum=1
    )
    max_source_pixels: int = option(
        100_000_000, "Largest area that an image file may claim.", minimum=1
    )
    on_bad_sample: str = option(
        "raise", "At a sample that cannot be used.", choices=("raise", "skip")
    )
    num_workers: int = option(
        1, "Loader processes per rank; they also plan the coming steps.", minimum=0
    )
    pin_memory: bool = option(False, "Put batches into page-locked memory.")
    cache_dir: str | None = option(None, "Folder for the size index and the tokenizer.")
    progress: bool = option(True, "Show progress while preparing the data.")


@dataclass
class ChartSourceConf:
    """Charts drawn from real tables, on first use, each with its table as text."""

    _target_: str = "lightning_entrain.data.charts.source.ChartSource"
    num_samples: int = option(256, "Number of charts.", minimum=1)
    seed: int = option(0, "Seed of the charts; not that of the run.", minimum=0)
    min_side: int = option(60, "Longer side of the smallest charts, pixels.", minimum=32)
    max_side: int = option(3000, "Longer side of the largest charts, pixels.", maximum=8000)
    text_only_fraction: float = option(
        0.0,
        "Share of samples that have the table as text in place of a chart.",
        minimum=0,
        maximum=1,
    )
    cache_dir: str | None = option(
        None, "Folder for the charts; null takes the user's cache folder."
    )
    num_workers: int | None = option(
        None, "Processes that draw; null takes one per core.", minimum=1
    )
    progress: bool = option(True, "Show progress while drawing.")


@dataclass
class FolderSourceConf:
    """Parquet files in FineVision's schema: columns images and texts."""

    _target_: str = "lightning_entrain.data.parquet.ParquetSource"
    folder: str = option(MISSING, "Folder of the files, at any depth.")
    max_samples: int | None = option(None, "Take only the first so many.", minimum=1)
    image_column: str = option("images", "Column of images.")
    text_column: str = option("texts", "Column of turns.")


@dataclass
class SyntheticSourceConf:
    """Random images and texts of very different sizes, in memory."""

    _target_: str = "lightning_entrain.data.synthetic.SyntheticSource"
    num_samples: int = option(64, "Number of samples.", minimum=1)
    seed: int = option(0, "Seed of the samples; not that of the run.", minimum=0)
    text_only_fraction: float = option(0.2, "Share without an image.", minimum=0, maximum=1)
    min_side: int = option(20, "Least side of an image, pixels.", minimum=1)
    max_side: int = option(300, "Largest side of an image, pixels.", minimum=1)
    max_words: int = option(24, "Most words in an answer.", minimum=1)


@dataclass
class TinyVlmConf:
    """A Qwen2.5 vision transformer and a Llama, built from their configs with random weights."""

    _target_: str = "lightning_entrain.models.tiny.tiny_vlm"
    encoder_layers: int = option(4, "Layers of the encoder.", minimum=1)
    encoder_hidden_size: int = option(128, "Columns of the encoder.", minimum=4)
    encoder_intermediate_size: int = option(344, "Columns of the encoder's MLP.", minimum=1)
    encoder_heads: int = option(4, "Attention heads of the encoder.", minimum=1)
    full_attention_every: int = option(
        2, "Each so many-th encoder layer sees the whole image, the others windows.", minimum=1
    )
    llm_layers: int = option(4, "Layers of the LLM.", minimum=1)
    llm_hidden_size: int = option(192, "Columns of the LLM.", minimum=2)
    llm_intermediate_size: int = option(512, "Columns of the LLM's MLP.", minimum=1)
    llm_heads: int = option(6, "Attention heads of the LLM.", minimum=1)
    llm_key_value_heads: int = option(2, "Key and value heads of the LLM.", minimum=1)
    patch_size: int = option(14, "Side of a patch, pixels; the data's patch size.", minimum=1)
    window_size: int = option(112, "Side of an attention window, pixels.", minimum=1)
    max_position_embeddings: int = option(32768, "Longest sample, tokens.", minimum=1)
    tie_word_embeddings: bool = option(False, "Whether embedding and head are one parameter.")
    seed: int = option("${seed}", "Seed of the weights.", minimum=0)
    encoder_recompute: str = option(
        "none",
        "What of the encoder runs again in backward, to save memory: none, full, every_N (whole "
        "layers), attention, mlp.",
    )
    llm_recompute: str = option("none", "The same for the LLM.")


@dataclass
class ModuleConf:
    """The LightningModule around the model: optimizer and learning rate."""

    _target_: str = "lightning_entrain.module.EntrainLightningModule"
    optimizer: str = option("adamw", "Optimizer.", choices=("adamw", "sgd"))
    learning_rate: float = option(3e-3, "Peak learning rate.", above=0)
    weight_decay: float = option(0.01, "Decay of weight matrices.", minimum=0)
    momentum: float = option(0.0, "Momentum of sgd.", minimum=0, maximum=1)
    schedule: str = option(
        "cosine", "Learning rate after the warm-up.", choices=("cosine", "constant")
    )
    warmup_steps: int = option(4, "Optimizer steps of linear warm-up.", minimum=0)
    min_learning_rate_ratio: float = option(
        0.1, "The cosine ends at this share of the peak.", minimum=0, maximum=1
    )
    max_steps: int | None = option(
        None, "Step at which the cosine ends; null takes the trainer's last.", minimum=1
    )
    freeze: list[str] = option([], "Parts that are not trained: encoder, projector, llm.")
    lora: list[str] = option(
        [], "Modules trained by adapters alone (needs the extra lora): encoder, llm."
    )
    lora_rank: int = option(8, "Rank of the adapters.", minimum=1)
    lora_alpha: float = option(16.0, "Adapters are scaled by this over their rank.", above=0)
    lora_dropout: float = option(0.0, "Dropout before the adapters.", minimum=0, maximum=0.99)


@dataclass
class EntrainStrategyConf:
    """A pipeline: encoder stages on some processes, LLM stages on the others."""

    _target_: str = "lightning_entrain.strategy.EntrainStrategy"
    encoder_stages: int | None = option(
        None, "Encoder stages per replica; null plans them from the data's costs.", minimum=1
    )
    llm_stages: int | None = option(
        None, "LLM stages per replica; null takes the processes that are left.", minimum=1
    )
    replicas: int = option(1, "Data-parallel copies of the pipeline.", minimum=1)
    plan: str | None = option(
        None, "File of entrain-plan: sets replicas, stages, layers and microbatches."
    )
    schedule: str = option(
        "auto",
        "Order of forward and backward passes; auto simulates all for every step.",
        choices=("auto", "1f1b", "1f1b_split", "1f1b_eager", "zero_bubble"),
    )
    checkpoint: str = option(
        "consolidated",
        "One file, as of one process, or a folder to which each process writes its part.",
        choices=("consolidated", "sharded"),
    )
    async_checkpoint: bool = option(False, "Write checkpoints while training goes on.")
    full_precision_gradients: bool = option(
        True, "Add up a step's gradients of bf16-true parameters in float32."
    )
    compile: bool = option(
        False, "Compile MLPs, norms and projectors; leaves out schedules that split backward."
    )
    compile_backend: str = option("inductor", "Backend of torch.compile.")
    timeout_seconds: float = option(
        600.0, "Longest wait for another process, seconds, before the job ends.", above=0
    )
    stop_seconds: float = option(
        60.0, "Longest time to finish a step after SIGTERM, seconds, before saving.", above=0
    )
    process_group_backend: str | None = option(
        None, "gloo or nccl; null takes the device's usual one.", choices=("gloo", "nccl")
    )


@dataclass
class SingleStrategyConf:
    """The whole model on one process, without a pipeline."""

    _target_: str = "lightning_entrain.config.single_device"


@dataclass
class TrainerConf:
    """Arguments of Lightning's Trainer."""

    accelerator: str = option(
        "cpu", "What the processes run on.", choices=("auto", "cpu", "gpu", "cuda", "mps")
    )
    devices: int | None = option(
        None,
        "Processes on this machine; null takes replicas x stages, 2 for the default layout.",
        minimum=1,
    )
    max_steps: int = option(48, "Optimizer steps; -1 for no limit.", minimum=-1)
    max_epochs: int | None = option(None, "Passes over the data; null for no limit.", minimum=1)
    precision: str = option(
        "32-true",
        "Number format, as Lightning names it.",
        choices=("32-true", "64-true", "bf16-true", "bf16-mixed"),
    )
    accumulate_grad_batches: int = option(1, "Global batches per optimizer step.", minimum=1)
    gradient_clip_val: float | None = option(
        1.0, "Greatest norm of the gradient over all stages; null for no clipping.", above=0
    )
    val_check_interval: int | None = option(
        16, "Training batches between validations; null validates once per epoch.", minimum=1
    )
    limit_val_batches: int = option(2, "Global batches per validation; 0 for none.", minimum=0)
    log_every_n_steps: int = option(1, "Steps between logged values.", minimum=1)
    enable_progress_bar: bool = option(True, "Show a progress bar.")
    deterministic: bool = option(False, "Refuse operations whose result may vary.")
    extra: dict[str, Any] = option(
        {}, "Further Trainer arguments: +trainer.extra.fast_dev_run=true."
    )


@dataclass
class CsvLoggerConf:
    """Writes metrics.csv, one row per step."""

    _target_: str = "lightning_entrain.loggers.StepCSVLogger"
    save_dir: str = option("${run_dir}", "Folder of metrics.csv.")
    flush_logs_every_n_steps: int = option(10, "Steps between writes.", minimum=1)


@dataclass
class WandbLoggerConf:
    """Writes a W&B run, offline unless a key is configured."""

    _target_: str = "lightning_entrain.loggers.make_wandb_logger"
    save_dir: str = option("${run_dir}", "Folder below which wandb/ is made.")
    project: str = option("lightning-entrain", "W&B project.")
    name: str | None = option(None, "Name of the run; null lets W&B choose.")
    group: str | None = option(None, "Name that runs to be compared share.")
    tags: list[str] | None = option(None, "Tags of the run.")
    mode: str = option(
        "auto",
        "auto is WANDB_MODE if set, else online where a key is configured, else offline.",
        choices=("auto", "online", "offline", "disabled"),
    )


@dataclass
class VariabilityConf:
    """Logs the spread of work over microbatches, every step."""

    _target_: str = "lightning_entrain.callbacks.variability.WorkloadVariabilityMonitor"
    num_table_steps: int = option(64, "Most steps whose loads W&B gets as a table.", minimum=2)


@dataclass
class TimelineConf:
    """Logs the idle time of the pipeline and its causes."""

    _target_: str = "lightning_entrain.callbacks.timeline.PipelineTimelineMonitor"
    every_n_steps: int = option(20, "Steps between two looks; also step 1.", minimum=1)
    picture_every_n_steps: int = option(100, "Steps between two pictures for W&B.", minimum=1)
    dirpath: str = option("${run_dir}", "Folder of plan.json and trace.json.")


@dataclass
class ThroughputConf:
    """Logs samples and tokens per second, FLOPs, and waiting."""

    _target_: str = "lightning_entrain.callbacks.throughput.ThroughputMonitor"
    every_n_steps: int | None = option(
        None, "Steps between two values; null takes log_every_n_steps.", minimum=1
    )
    device_name: str | None = option(
        None, "Device whose peak the FLOPs are compared with, such as h100; null finds out."
    )


@dataclass
class MemoryConf:
    """Logs each process's peak memory."""

    _target_: str = "lightning_entrain.callbacks.memory.MemoryMonitor"
    every_n_steps: int = option(20, "Steps between two looks; also step 1.", minimum=1)


@dataclass
class DriftConf:
    """Compares measured with predicted times, and names a better plan."""

    _target_: str = "lightning_entrain.callbacks.drift.CostModelDriftMonitor"
    every_n_steps: int = option(20, "Steps between two looks; also step 1.", minimum=1)
    tolerance: float = option(0.25, "Drift of a stage above which it warns.", above=0)
    min_gain: float = option(0.05, "Gain above which it names a better plan.", above=0)


@dataclass
class BatchSizeConf:
    """Compares the global batch with the smallest stable one."""

    _target_: str = "lightning_entrain.callbacks.batch_size.BatchSizeAdvisor"


@dataclass
class ReportConf:
    """Writes report.html when a run ends."""

    _target_: str = "lightning_entrain.callbacks.report.RunReport"
    dirpath: str = option("${run_dir}", "Folder of report.html.")
    num_compared: int = option(12, "Batches simulated under other policies; 0: none.", minimum=0)
    name: str | None = option(None, "Title of the report; null takes the folder's name.")
    show_plan: bool = option(True, "Print the plan when training starts.")


@dataclass
class CheckpointConf:
    """Writes checkpoints that one process can load."""

    _target_: str = "lightning_entrain.callbacks.checkpoint.RunCheckpoint"
    dirpath: str = option("${run_dir}/checkpoints", "Folder of the checkpoints.")
    filename: str = option("step{step:06d}", "Name of a checkpoint without its ending.")
    monitor: str | None = option(
        "val/loss", "Value that decides which is best; null keeps the latest."
    )
    mode: str = option(
        "min", "Whether a smaller or greater value is better.", choices=("min", "max")
    )
    save_top_k: int = option(1, "Best checkpoints kept; -1 keeps all.", minimum=-1)
    save_last: bool = option(True, "Also write last.ckpt at the last step.")
    every_n_train_steps: int | None = option(
        None, "Steps between checkpoints; null writes one after each validation.", minimum=1
    )


@dataclass
class TrainConf:
    """Options of `entrain-train`."""

    seed: int = option(0, "Seed of weights, data order and everything drawn.", minimum=0)
    assignment: str = option(
        "joint",
        "Policy that assigns samples to replicas and microbatches.",
        choices=("fixed", "disttrain", "dip", "entrain", "joint"),
    )
    run_dir: str = option("${hydra:runtime.output_dir}", "Folder that the run is written to.")
    ckpt_path: str | None = option(None, "Checkpoint to resume from.")
    debug: bool = option(False, "Show a traceback when a run ends with an error.")
    data: Any = field(default=MISSING, metadata={"meaning": "Group: where samples come from."})
    model: Any = field(default=MISSING, metadata={"meaning": "Group: the model."})
    module: ModuleConf = field(default_factory=ModuleConf)
    strategy: Any = field(default=MISSING, metadata={"meaning": "Group: how it is spread."})
    trainer: TrainerConf = field(default_factory=TrainerConf)
    logger: dict[str, Any] = option({}, "Group: loggers by name.")
    callbacks: dict[str, Any] = option({}, "Group: callbacks by name.")


def single_device() -> str:
    """Lightning's own strategy for one device."""
    return "auto"


GROUPS: dict[str, dict[str, type]] = {
    "data": {"planned": PlannedDataConf},
    "source": {
        "charts": ChartSourceConf,
        "folder": FolderSourceConf,
        "synthetic": SyntheticSourceConf,
    },
    "model": {"tiny_vlm": TinyVlmConf},
    "strategy": {"entrain": EntrainStrategyConf, "single": SingleStrategyConf},
    "logger": {"csv": CsvLoggerConf, "wandb": WandbLoggerConf},
    "callbacks": {
        "variability": VariabilityConf,
        "timeline": TimelineConf,
        "throughput": ThroughputConf,
        "memory": MemoryConf,
        "drift": DriftConf,
        "batch_size": BatchSizeConf,
        "report": ReportConf,
        "checkpoint": CheckpointConf,
    },
}


def register_configs() -> None:
    """Put the structured configs where the files in conf/ refer to them: the group schema/."""
    store = ConfigStore.instance()
    store.store(name="train_schema", node=TrainConf)
    for group, schemas in GROUPS.items():
        for name, schema in schemas.items():
            store.store(group=f"schema/{group}", name=name, node=schema)


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
                _check_range(f"{path}{entry.name}", config[entry.name], dict(entry.metadata))
    for key in config:
        name = str(key)
        if not OmegaConf.is_interpolation(config, name) and not OmegaConf.is_missing(config, name):
            value = config[name]
            if isinstance(value, DictConfig):
                validate(value, f"{path}{name}.")
    if not path and schema is TrainConf:
        num_devices(config)


def _check_range(name: str, value: Any, metadata: dict[str, Any]) -> None:
    if value is None:
        return
    choices = metadata.get("choices")
    limit = describe_range(metadata)
    remedy = f"set {name} within that"
    if choices and value not in choices:
        raise ConfigError(f"{name} is {value!r}", limit=limit, remedy=f"set {name}={choices[0]}")
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return
    low, above, high = metadata.get("minimum"), metadata.get("above"), metadata.get("maximum")
    if math.isinf(value):
        raise ConfigError(f"{name} is {value}", limit="a finite number", remedy=f"lower {name}")
    # Written so that NaN, which compares false with everything, is out of range.
    if low is not None and not value >= low:
        raise ConfigError(f"{name} is {value}", limit=limit, remedy=remedy)
    if above is not None and not value > above:
        raise ConfigError(f"{name} is {value}", limit=limit, remedy=remedy)
    if high is not None and not value <= high:
        raise ConfigError(f"{name} is {value}", limit=limit, remedy=remedy)


def describe_range(metadata: dict[str, Any]) -> str:
    """The range of an option in words; empty where it has none."""
    if metadata.get("choices"):
        return "one of " + ", ".join(metadata["choices"])
    parts = []
    if metadata.get("minimum") is not None:
        parts.append(f"at least {metadata['minimum']}")
    if metadata.get("above") is not None:
        parts.append(f"above {metadata['above']}")
    if metadata.get("maximum") is not None:
        parts.append(f"at most {metadata['maximum']}")
    return ", ".join(parts)


def num_devices(config: DictConfig) -> int:
    """Processes of a run: as asked for, or as many as the layout needs.

    Args:
        config: A composed `TrainConf`.

    Raises:
        ConfigError: If devices, replicas and stages do not fit each other.
    """
    strategy, devices = config.strategy, config.trainer.devices
    schema = OmegaConf.get_type(strategy)
    if schema is SingleStrategyConf:
        if devices not in (None, 1):
            raise ConfigError(
                f"trainer.devices is {devices} with strategy=single",
                limit="1 process",
                remedy="leave trainer.devices out, or set strategy=entrain",
            )
        return 1
    if schema is not EntrainStrategyConf:
        return devices or 1
    from lightning_entrain.plan.layout import LayoutRequest

    if strategy.plan is not None:
        from lightning_entrain.plan_file import read_plan

        return int(devices or read_plan(strategy.plan).num_gpus)
    stages = (strategy.encoder_stages or 1) + (strategy.llm_stages or 1)
    found = devices if devices is not None else strategy.replicas * stages
    LayoutRequest(
        world_size=found,
        replicas=strategy.replicas,
        encoder_stages=strategy.encoder_stages,
        llm_stages=strategy.llm_stages,
    ).ranks_per_replica()
    return int(found)
