"""The options of loggers and callbacks."""

# ruff: noqa: RUF009 - `option` returns a dataclass field

from __future__ import annotations

from dataclasses import dataclass

from lightning_entrain.config_option import option


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
    every_n_steps: int = option(20, "Steps between two looks; also step 3.", minimum=1)
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
    every_n_steps: int = option(20, "Steps between two looks; also step 3.", minimum=1)


@dataclass
class DriftConf:
    """Compares measured with predicted times, and names a better plan."""

    _target_: str = "lightning_entrain.callbacks.drift.CostModelDriftMonitor"
    every_n_steps: int = option(20, "Steps between two looks; also step 3.", minimum=1)
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
