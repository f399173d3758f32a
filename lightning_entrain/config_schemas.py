"""The options of a run: data, model, module, strategy and trainer."""

# ruff: noqa: RUF009 - `option` returns a dataclass field

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from lightning_entrain.config_option import option
from lightning_entrain.plan.placements import PLACEMENTS


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
    placement: str = option(
        "one_per_rank",
        "How stages lie on processes; the others let one hold several stages, and choose them.",
        choices=PLACEMENTS,
    )
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
        60.0,
        "Longest time to finish a step after SIGTERM or Ctrl-C, seconds, before saving.",
        above=0,
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
        "Processes on each machine; null takes replicas x stages in all, of 3 stages by default.",
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
class TrainConf:
    """Options of `entrain-train`."""

    seed: int = option(
        0, "Seed of weights, data order and everything drawn.", minimum=0, maximum=2**32 - 1
    )
    assignment: str = option(
        "joint",
        "Policy that assigns samples to replicas and microbatches.",
        choices=("fixed", "disttrain", "dip", "entrain", "joint"),
    )
    run_dir: str = option("${hydra:runtime.output_dir}", "Folder that the run is written to.")
    ckpt_path: str | None = option(None, "Checkpoint to resume from.")
    prepare_timeout_seconds: float = option(
        3600.0, "Longest wait of other ranks for the data to be prepared.", minimum=0.0
    )
    debug: bool = option(False, "Show a traceback when a run ends with an error.")
    data: Any = field(default=MISSING, metadata={"meaning": "Group: where samples come from."})
    model: Any = field(default=MISSING, metadata={"meaning": "Group: the model."})
    module: ModuleConf = field(default_factory=ModuleConf)
    strategy: Any = field(default=MISSING, metadata={"meaning": "Group: how it is spread."})
    trainer: TrainerConf = field(default_factory=TrainerConf)
    logger: dict[str, Any] = option({}, "Group: loggers by name.")
    callbacks: dict[str, Any] = option({}, "Group: callbacks by name.")
