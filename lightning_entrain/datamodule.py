"""EntrainDataModule: planned global batches for the Lightning Trainer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_entrain.data.bpe import BpeTokenizer, trained_tokenizer, trainer_version
from lightning_entrain.data.cache import cache_folders, first_writable, short_digest
from lightning_entrain.data.dataset import SizedDataset
from lightning_entrain.data.index import SizeTable, build_index, index_path
from lightning_entrain.data.planned import BatchShape, GlobalBatches, Policy, resolve_policy
from lightning_entrain.data.records import Source
from lightning_entrain.data.sampler import PlannedLoader, PlannedSampler, outlive_signals
from lightning_entrain.data.split import SPLITS as SPLITS
from lightning_entrain.data.split import check_options, split_samples, too_long_samples
from lightning_entrain.data.tokenizer import TextTokenizer
from lightning_entrain.errors import ConfigError, DataError
from lightning_entrain.plan.planner import WorkloadProfile
from lightning_entrain.planning import Workload
from lightning_entrain.workload.image_rule import ImageRule
from lightning_entrain.workload.sizes import SampleSize

_MAX_PROFILED_SAMPLES = 8192


class EntrainDataModule(pl.LightningDataModule):
    """Yields global batches whose every sample's place is planned before anything is loaded.

    A batch is a :class:`PlannedBatch`, packed without padding. All ranks yield the same batches in
    the same order, and each loads only the tensors its stages work on: it asks the trainer's
    strategy for ``num_replicas`` and ``data_needs``, and loads everything for one replica where the
    strategy has no such attributes. Training resumed in the middle of an epoch goes on with the
    next global batch.

    Args:
        source: The samples.
        global_batch_size: Samples per optimizer step, over all replicas.
        num_microbatches: Microbatches per replica (K); default 4 unless ``micro_batch_size`` is
            given.
        micro_batch_size: Samples per microbatch, instead of ``num_microbatches``.
        assignment: Name of the policy that assigns samples to replicas and microbatches, or a
            function (see :class:`Policy`).
        max_lag: 1 lets a sample's LLM work lag one microbatch behind its encoding (deferral), 0
            forbids it. None: 1 for ``entrain``, which is defined by it, else 0.
        seed: Decides the order of training samples, together with the epoch.
        shuffle: Whether training samples are shuffled every epoch.
        val_fraction: Share of the samples kept for validation. Which they are does not depend on
            ``seed``.
        test_fraction: Share of the samples kept for testing.
        tokenizer: Default: a byte-level BPE trained on the source, once.
        vocab_size: Most ids of that BPE.
        max_tokens: Longest LLM row of a sample, vision tokens included.
        min_pixels: Least area of an image after resizing.
        max_pixels: Largest area of an image after resizing.
        patch_size: Side of a patch in pixels.
        merge_size: Side, in patches, of the square that becomes one vision token.
        max_source_pixels: Largest area an image file may claim.
        on_bad_sample: ``"raise"`` at the first sample that cannot be used, or ``"skip"`` them all
            and warn with their number.
        num_workers: Loader processes per rank. They load and also plan the coming steps beside the
            training; 0 does both in the training process, which waits for it.
        pin_memory: Whether batches are put into page-locked memory.
        cache_dir: Folder for the size index and the tokenizer; default: beside the data, or where
            that cannot be written, the user's cache folder.
        progress: Whether to show progress bars.

    Raises:
        ConfigError: If an option has a value that cannot be used.
    """

    def __init__(
        self,
        source: Source,
        *,
        global_batch_size: int = 16,
        num_microbatches: int | None = None,
        micro_batch_size: int | None = None,
        assignment: str | Policy = "joint",
        max_lag: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        val_fraction: float = 0.1,
        test_fraction: float = 0.0,
        tokenizer: TextTokenizer | None = None,
        vocab_size: int = 1024,
        max_tokens: int = 8192,
        min_pixels: int = 56 * 56,
        max_pixels: int = 28 * 28 * 1280,
        patch_size: int = 14,
        merge_size: int = 2,
        max_source_pixels: int = 100_000_000,
        on_bad_sample: Literal["raise", "skip"] = "raise",
        num_workers: int = 1,
        pin_memory: bool = False,
        cache_dir: str | None = None,
        progress: bool = True,
    ) -> None:
        super().__init__()
        if num_microbatches is None and micro_batch_size is None:
            num_microbatches = 4
        self.source = source
        self.shape = BatchShape(
            global_batch_size=global_batch_size,
            num_microbatches=num_microbatches,
            micro_batch_size=micro_batch_size,
        )
        self.policy = resolve_policy(assignment, max_lag)
        self.image_rule = ImageRule(
            patch_size=patch_size,
            merge_size=merge_size,
            min_pixels=min_pixels,
            max_pixels=max_pixels,
            max_source_pixels=max_source_pixels,
        )
        check_options(seed, val_fraction, test_fraction, max_tokens, on_bad_sample, num_workers)
        self.seed = seed
        self.shuffle = shuffle
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        self.max_tokens = max_tokens
        self.on_bad_sample = on_bad_sample
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self.cache_dir = cache_dir
        self.progress = progress
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._dataset: SizedDataset | None = None
        self._fingerprints: dict[str, Any] | None = None
        self._parts: dict[str, list[int]] = {}

    # --- what the data is -----------------------------------------------------------------------

    @property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer; one that is trained on the source is read from its cache.

        Raises:
            DataError: If it has not been trained yet.
        """
        if self._tokenizer is None:
            self._tokenizer = BpeTokenizer.load(self._find(self._tokenizer_name()))
        return self._tokenizer

    @property
    def dataset(self) -> SizedDataset:
        """All samples with their sizes, whatever their split. Valid after :meth:`setup`."""
        if self._dataset is None:
            self.setup()
        assert self._dataset is not None
        return self._dataset

    @property
    def num_skipped(self) -> int:
        """Samples left out because they cannot be used. Valid after :meth:`setup`."""
        return len(cast(SizeTable, self.dataset.sizes).bad)

    def part(self, split: str) -> list[int]:
        """Indices in :attr:`dataset` of a split's samples: ``train``, ``val`` or ``test``."""
        self.dataset  # noqa: B018  (sets up)
        return self._parts[split]

    def profile(
        self, workload: Workload | None = None, num_gpus: int | None = None
    ) -> WorkloadProfile:
        """Profile batches of the training samples (paper, section 4.2, Algorithm 1).

        Args:
            workload: What samples cost; default that of the trainer's strategy.
            num_gpus: Devices of one replica; default the strategy's.

        Returns:
            The smallest stable batch size b_min, the modules' shares of the work, and the splits
            seen per batch size.

        Raises:
            ConfigError: If there is no strategy that knows costs and no workload is given.
        """
        strategy = getattr(self.trainer, "strategy", None)
        workload = workload or getattr(strategy, "workload", None)
        if workload is None:
            raise ConfigError(
                "profile() does not know what samples cost",
                limit="a model built from Hugging Face configurations",
                remedy="pass workload=workload_of(model, device)",
            )
        if num_gpus is None:
            num_gpus = max(
                2, getattr(strategy, "world_size", 2) // getattr(strategy, "num_replicas", 1)
            )
        return workload.profile(self.train_sizes(), num_gpus)

    def train_sizes(self) -> list[SampleSize]:
        """Sizes of training samples, at most 8,192, evenly spread. Valid after :meth:`setup`."""
        part = self.part("train")
        step = -(-len(part) // _MAX_PROFILED_SAMPLES)
        return [self.dataset.sizes[index] for index in part[:: max(step, 1)]]

    # --- Lightning's hooks ----------------------------------------------------------------------

    def prepare_data(self) -> None:
        """Draw or check the data, train the tokenizer, build the size index: on one process.

        Raises:
            DataError: If the data is missing or damaged, or a cache cannot be written.
            SampleError: If a sample cannot be used.
        """
        self.source.prepare()
        folder = first_writable(self._folders())
        if self._tokenizer is None:
            path = folder / self._tokenizer_name()
            self._tokenizer = trained_tokenizer(path, self._texts(), self._vocab_size)
        self._checked(
            build_index(
                index_path(folder, self.source, self._tokenizer, self.image_rule),
                self.source,
                self._tokenizer,
                self.image_rule,
                skip_bad=self.on_bad_sample == "skip",
                progress=self.progress,
            )
        )

    def is_prepared(self) -> bool:
        """Whether what :meth:`prepare_data` writes is there for :meth:`setup` to read."""
        try:
            name = index_path(Path(), self.source, self.tokenizer, self.image_rule).name
        except DataError:
            return False
        return self._find(name).exists()

    def setup(self, stage: str | None = None) -> None:
        """Read the size index and split the samples: on every process.

        Raises:
            ConfigError: If the strategy's replicas cannot share a global batch evenly.
            DataError: If :meth:`prepare_data` has not been called, or too few samples are left.
            SampleError: If a sample cannot be used.
        """
        self.shape.check_replicas(self._num_replicas())
        if self._dataset is not None:
            return
        name = index_path(Path(), self.source, self.tokenizer, self.image_rule).name
        table = self._checked(SizeTable.load(self._find(name)))
        if table.bad:
            rank_zero_warn(
                f"{len(table.bad)} of {len(table) + len(table.bad)} samples cannot be used and are "
                f"left out. The first: {table.bad[0].error()}"
            )
        self._parts = split_samples(len(table), self.val_fraction, self.test_fraction)
        num_train = len(self._parts["train"])
        if num_train < self.shape.global_batch_size:
            raise DataError(
                f"{num_train} samples are left for training, of {len(table) + len(table.bad)} in "
                f"{self.source.name}",
                limit=f"at least one global batch of {self.shape.global_batch_size}",
                remedy="add data, or lower global_batch_size or val_fraction",
            )
        rows = table.rows.tolist()
        self._dataset = SizedDataset(self.source, self.tokenizer, self.image_rule, table, rows)

    def train_dataloader(self) -> PlannedLoader:
        """Global batches for training; an incomplete last one is left out."""
        return self._loader("train", shuffle=self.shuffle, drop_last=True)

    def val_dataloader(self) -> PlannedLoader | list[Any]:
        """Global batches for validation, the incomplete last one included."""
        return self._loader("val") if self.part("val") else []

    def test_dataloader(self) -> PlannedLoader | list[Any]:
        """Global batches for testing, the incomplete last one included."""
        return self._loader("test") if self.part("test") else []

    def predict_dataloader(self) -> PlannedLoader | list[Any]:
        """The samples for testing; those for validation where there are none for testing."""
        return self.test_dataloader() if self.part("test") else self.val_dataloader()

    def state_dict(self) -> dict[str, Any]:
        """What the data is; where training stands is in the loader's state."""
        # As at the start: a checkpoint must not depend on the present state of the files.
        if self._fingerprints is None:
            self._fingerprints = {
                "source": self.source.fingerprint(),
                "tokenizer": self.tokenizer.fingerprint(),
            }
        return dict(self._fingerprints)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Warn if a checkpoint was made with other data."""
        own = self.state_dict()
        for name in ("source", "tokenizer"):
            if state_dict.get(name, own[name]) != own[name]:
                rank_zero_warn(f"The checkpoint was made with another {name} than the present one")

    # --- inside ---------------------------------------------------------------------------------

    def _loader(
        self, split: str, *, shuffle: bool = False, drop_last: bool = False
    ) -> PlannedLoader:
        strategy = getattr(self.trainer, "strategy", None)
        part = self.part(split)
        batches = GlobalBatches(
            self.dataset,
            part,
            shape=self._planned_shape(getattr(strategy, "num_microbatches", None)),
            policy=self.policy,
            costs=getattr(strategy, "sample_costs", None),
            plan_step=getattr(strategy, "step_planner", None),
            train=split == "train",
            num_replicas=self._num_replicas(),
            needs=getattr(strategy, "data_needs", None),
            seed=self.seed,
        )
        sampler = PlannedSampler(
            len(part),
            self.shape.global_batch_size,
            shuffle=shuffle,
            seed=self.seed,
            drop_last=drop_last,
        )
        return PlannedLoader(
            batches,
            sampler=cast(Any, sampler),
            batch_size=None,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            worker_init_fn=outlive_signals if self.num_workers else None,
            # Of its own: iterating must not draw from the generator that checkpoints restore.
            generator=torch.Generator().manual_seed(self.seed),
        )

    def _num_replicas(self) -> int:
        return int(getattr(getattr(self.trainer, "strategy", None), "num_replicas", 1))

    def _planned_shape(self, num_microbatches: int | None) -> BatchShape:
        """The shape, with the number of microbatches of the strategy's plan if it was given one."""
        if num_microbatches is None:
            return self.shape
        return replace(self.shape, num_microbatches=num_microbatches, micro_batch_size=None)

    def _texts(self) -> Iterator[str]:
        for row in range(len(self.source)):
            for turn in self.source.texts(row):
                yield turn.user
                yield turn.assistant

    def _checked(self, table: SizeTable) -> SizeTable:
        """The table without samples that are too long, or an error about the first bad one."""
        too_long = too_long_samples(table, self.source.name, self.max_tokens)
        bad = [*table.bad, *too_long]
        if bad and self.on_bad_sample == "raise":
            raise bad[0].error()
        return table.without(too_long) if too_long else table

    def _tokenizer_name(self) -> str:
        digest = short_digest(self.source.fingerprint(), f"{self._vocab_size}", trainer_version())
        return f"tokenizer-{digest}.json"

    def _folders(self) -> list[Path]:
        """Folders for caches, best first."""
        return cache_folders(getattr(self.source, "folder", None), self.cache_dir)

    def _find(self, name: str) -> Path:
        paths = [folder / name for folder in self._folders()]
        return next((path for path in paths if path.exists()), paths[-1])
