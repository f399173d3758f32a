from __future__ import annotations

import inspect
import shutil
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

import lightning_entrain.data.cache as cache_file
from lightning_entrain import EntrainDataModule
from lightning_entrain.config import PlannedDataConf
from lightning_entrain.data import images
from lightning_entrain.data.batch import DataNeeds, PlannedBatch
from lightning_entrain.data.cache import CACHE_VARIABLE
from lightning_entrain.data.charts.source import ChartSource
from lightning_entrain.data.parquet import ParquetSource
from lightning_entrain.data.sampler import PlannedLoader
from lightning_entrain.data.synthetic import SyntheticSource
from lightning_entrain.data.tokenizer import ByteTokenizer
from lightning_entrain.errors import CheckpointError, ConfigError, DataError, SampleError
from tests.data.helpers import ListSource, picture, turns, write_folder


@pytest.fixture(autouse=True)
def user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "user_cache"
    monkeypatch.setenv(CACHE_VARIABLE, str(folder))
    return folder


def make(source: Any = None, **options: Any) -> EntrainDataModule:
    options = {
        "global_batch_size": 4,
        "num_microbatches": 2,
        "assignment": "fixed",
        "tokenizer": ByteTokenizer(),
        "progress": False,
        "num_workers": 0,
        **options,
    }
    return EntrainDataModule(source or SyntheticSource(22, max_side=60), **options)


def ready(source: Any = None, **options: Any) -> EntrainDataModule:
    datamodule = make(source, **options)
    datamodule.prepare_data()
    datamodule.setup()
    return datamodule


class Recorder(pl.LightningModule):
    """Notes which samples it is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[tuple[int, ...]] = []
        self.indices: list[int] = []
        self.validated: list[tuple[int, ...]] = []

    def training_step(self, batch: PlannedBatch, batch_idx: int) -> Tensor:
        self.seen.append(batch.sample_indices)
        self.indices.append(batch_idx)
        loss = self.weight * batch.num_label_tokens
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: PlannedBatch, batch_idx: int) -> None:
        self.validated.append(batch.sample_indices)
        self.log("val", float(batch.num_samples))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(
    datamodule: EntrainDataModule, folder: Path, ckpt_path: str | None = None, **options: Any
) -> Recorder:
    module = Recorder()
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **{"enable_checkpointing": False, "num_sanity_val_steps": 0, **options},
    )
    trainer.fit(module, datamodule=datamodule, ckpt_path=ckpt_path)
    return module


# --- splits, sizes and batches --------------------------------------------------------------------


def test_splits_share_out_all_samples_whatever_the_seed() -> None:
    first = ready(val_fraction=0.2, test_fraction=0.1, seed=1)
    second = ready(val_fraction=0.2, test_fraction=0.1, seed=2)
    parts = [first.part(name) for name in ("train", "val", "test")]
    assert [len(part) for part in parts] == [16, 4, 2]
    assert sorted(i for part in parts for i in part) == list(range(22))
    assert parts == [second.part(name) for name in ("train", "val", "test")]
    orders = [[b.sample_indices for b in d.train_dataloader()] for d in (first, second)]
    assert orders[0] != orders[1]


def test_training_drops_the_last_incomplete_batch_and_validation_keeps_it() -> None:
    datamodule = ready(val_fraction=0.25, test_fraction=0.25)  # 10 + 6 + 6 samples
    sizes = [
        [batch.num_samples for batch in loader]
        for loader in (
            datamodule.train_dataloader(),
            datamodule.val_dataloader(),
            datamodule.test_dataloader(),
        )
    ]
    assert sizes == [[4, 4], [4, 2], [4, 2]]
    assert len(datamodule.val_dataloader()) == 2


def test_without_validation_samples_there_is_no_validation(tmp_path: Path) -> None:
    datamodule = ready(val_fraction=0.0)
    assert datamodule.val_dataloader() == []
    assert datamodule.test_dataloader() == []
    module = fit(datamodule, tmp_path, max_epochs=1)
    assert len(module.seen) == 5
    assert module.validated == []


def test_batches_are_those_of_the_sizes_known_before() -> None:
    datamodule = ready()
    for batch in datamodule.train_dataloader():
        assert batch.sizes == tuple(datamodule.dataset.sizes[i] for i in batch.sample_indices)
        patches = sum(len(row) for row in batch.pixels.values())
        assert patches == sum(size.num_patches for size in batch.sizes)
        assert sum(len(row) for row in batch.input_ids.values()) == batch.num_tokens


def test_samples_of_very_different_sizes_share_a_batch_without_padding() -> None:
    text = turns("read|table")
    samples = [((picture(60, 42),), text), ((picture(3000, 2000),), text), ((), text)] * 4
    datamodule = ready(ListSource(samples), max_pixels=200_704, val_fraction=0, shuffle=False)
    batch = next(iter(datamodule.train_dataloader()))
    assert [size.num_vision_tokens for size in batch.sizes] == [4, 247, 0, 4]
    rows = {key: len(row) for key, row in batch.pixels.items()}
    assert rows == {(0, 0): 4 * 251, (0, 1): 4 * 4}


# --- with a trainer -------------------------------------------------------------------------------


def test_every_epoch_shows_every_training_sample_in_a_new_order(tmp_path: Path) -> None:
    datamodule = make()
    module = fit(datamodule, tmp_path, max_epochs=3)
    epochs = [module.seen[i : i + 5] for i in (0, 5, 10)]
    assert len(module.seen) == 15
    assert all(len({i for batch in epoch for i in batch}) == 20 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert module.validated == [tuple(datamodule.part("val"))] * 3
    again = fit(make(), tmp_path, max_epochs=3)
    assert again.seen == module.seen


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("steps", [2, 5, 8])
def test_a_run_stopped_anywhere_goes_on_with_the_next_batch(
    steps: int, workers: int, tmp_path: Path
) -> None:
    whole = fit(make(num_workers=workers), tmp_path, max_epochs=3)
    saving = ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=1)
    first = fit(
        make(num_workers=workers),
        tmp_path,
        max_steps=steps,
        callbacks=[saving],
        enable_checkpointing=True,
    )
    assert first.seen == whole.seen[:steps]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*your dataloader is not resumable.*")
        second = fit(make(num_workers=workers), tmp_path, str(tmp_path / "last.ckpt"), max_epochs=3)
    assert first.seen + second.seen == whole.seen
    assert first.indices + second.indices == [0, 1, 2, 3, 4] * 3


def test_a_run_saved_during_validation_in_an_epoch_goes_on(tmp_path: Path) -> None:
    whole = fit(make(), tmp_path, max_epochs=2, val_check_interval=3)
    saving = ModelCheckpoint(tmp_path, save_last=True, every_n_epochs=1)
    first = fit(
        make(),
        tmp_path,
        max_epochs=2,
        val_check_interval=3,
        limit_val_batches=1,
        callbacks=[saving, StopAfter(3)],
        enable_checkpointing=True,
    )
    second = fit(make(), tmp_path, str(tmp_path / "last.ckpt"), max_epochs=2, val_check_interval=3)
    assert first.seen + second.seen == whole.seen


def test_a_run_saved_after_an_epoch_starts_the_next_one(tmp_path: Path) -> None:
    whole = fit(make(), tmp_path, max_epochs=3)
    saving = ModelCheckpoint(tmp_path, save_last=True, save_on_train_epoch_end=True)
    first = fit(make(), tmp_path, max_epochs=1, callbacks=[saving], enable_checkpointing=True)
    second = fit(make(), tmp_path, str(tmp_path / "last.ckpt"), max_epochs=3)
    assert first.seen + second.seen == whole.seen


def test_resuming_in_another_order_is_refused(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=1)
    fit(make(), tmp_path, max_steps=2, callbacks=[saving], enable_checkpointing=True)
    with pytest.raises(CheckpointError, match="seed=0, and now seed is 3"):
        fit(make(seed=3), tmp_path, str(tmp_path / "last.ckpt"), max_epochs=1)


def test_overfitting_repeats_the_first_batches(tmp_path: Path) -> None:
    module = fit(make(), tmp_path, max_epochs=2, overfit_batches=2)
    assert module.seen[:2] == module.seen[2:]
    assert len(module.seen) == 4


class StopAfter(pl.Callback):
    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.should_stop = trainer.global_step >= self.num_steps


# --- what each rank loads -------------------------------------------------------------------------


class Strategy:
    def __init__(self, num_replicas: int, data_needs: DataNeeds) -> None:
        self.num_replicas, self.data_needs = num_replicas, data_needs


class FakeTrainer:
    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy


def on_rank(needs: DataNeeds, num_replicas: int = 2) -> list[PlannedBatch]:
    datamodule = ready()
    datamodule.trainer = FakeTrainer(Strategy(num_replicas, needs))  # type: ignore[assignment]
    loader = datamodule.train_dataloader()
    assert len(loader) == 5
    return list(loader)


def test_all_ranks_plan_the_same_and_load_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    first_encoder = on_rank(DataNeeds(pixels=True, input_ids=False, labels=False, replica=1))
    everything = on_rank(DataNeeds.everything())
    middle = on_rank(DataNeeds(pixels=False, input_ids=False, labels=False))
    opened = []
    real = images.open_image
    monkeypatch.setattr(images, "open_image", lambda data: opened.append(1) or real(data))
    monkeypatch.setattr("lightning_entrain.data.synthetic.SyntheticSource.images", None)
    llm = on_rank_without_measuring(DataNeeds(pixels=False, input_ids=True, labels=True, replica=0))
    assert not opened
    for batches in zip(first_encoder, everything, middle, llm, strict=True):
        assert len({batch.assignment.digest() for batch in batches}) == 1
        assert len({batch.sample_indices for batch in batches}) == 1
        assert len({batch.num_label_tokens for batch in batches}) == 1
        encoder, whole, nothing, decoder = batches
        assert not encoder.input_ids
        assert not encoder.labels
        assert [nothing.pixels, nothing.input_ids, nothing.labels] == [{}, {}, {}]
        assert not decoder.pixels
        assert {r for r, _ in encoder.pixels} <= {1}
        assert {r for r, _ in decoder.input_ids} == {r for r, _ in decoder.labels} == {0}
        assert all(torch.equal(row, whole.pixels[key]) for key, row in encoder.pixels.items())
        assert all(torch.equal(row, whole.labels[key]) for key, row in decoder.labels.items())
    assert any(batch.pixels for batch in first_encoder)


def on_rank_without_measuring(needs: DataNeeds) -> list[PlannedBatch]:
    """As a rank that did not prepare: it finds the index in the cache."""
    datamodule = make()
    datamodule.setup()
    datamodule.trainer = FakeTrainer(Strategy(2, needs))  # type: ignore[assignment]
    return list(datamodule.train_dataloader())


def test_replicas_that_cannot_share_a_batch_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"global_batch_size is 4\..*3 replicas"):
        on_rank(DataNeeds.everything(), num_replicas=3)


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_loader_processes_give_the_same_batches(context: str) -> None:
    datamodule = ready()
    expected = [batch.labels for batch in datamodule.train_dataloader()]
    single = datamodule.train_dataloader()
    loader = PlannedLoader(
        single.dataset,
        sampler=single.sampler,
        batch_size=None,
        num_workers=1,
        multiprocessing_context=context,
    )
    found = [batch.labels for batch in loader]
    assert [list(rows) for rows in found] == [list(rows) for rows in expected]
    for rows, others in zip(found, expected, strict=True):
        assert all(torch.equal(rows[key], others[key]) for key in rows)


# --- caches ---------------------------------------------------------------------------------------


def folder_source(folder: Path, num_samples: int = 12) -> ParquetSource:
    samples = [
        ((picture(40 + i, 50),), turns(f"question {i}|answer {i}")) for i in range(num_samples)
    ]
    return ParquetSource(write_folder(folder, samples))


def test_tokenizer_and_index_are_cached_beside_the_data(tmp_path: Path, user_cache: Path) -> None:
    datamodule = make(folder_source(tmp_path / "data"), tokenizer=None, vocab_size=300)
    with pytest.raises(DataError, match=r"prepare_data\(\)"):
        datamodule.tokenizer  # noqa: B018
    datamodule.prepare_data()
    names = sorted(path.name.split("-")[0] for path in (tmp_path / "data" / ".entrain").iterdir())
    assert names == ["sizes", "tokenizer"]
    assert not user_cache.exists()
    # Another process reads both.
    other = make(ParquetSource(tmp_path / "data"), tokenizer=None, vocab_size=300)
    assert other.tokenizer.fingerprint() == datamodule.tokenizer.fingerprint()
    assert 260 < other.tokenizer.vocab_size <= 300
    other.setup()
    assert list(other.dataset.sizes) == list(datamodule.dataset.sizes)


def test_a_second_preparation_measures_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folder_source(tmp_path / "data")
    make(source, tokenizer=None).prepare_data()
    monkeypatch.setattr("lightning_entrain.data.index.measure_sample", None)
    monkeypatch.setattr("lightning_entrain.data.bpe.BpeTokenizer.train", None)
    make(source, tokenizer=None).prepare_data()


def test_changed_data_is_measured_anew(tmp_path: Path) -> None:
    source = folder_source(tmp_path / "data")
    assert len(ready(source).dataset) == 12
    folder_source(tmp_path / "data", 15)
    assert len(ready(source).dataset) == 15


def test_the_default_is_that_of_entrain_train() -> None:
    signature = inspect.signature(EntrainDataModule).parameters
    schema = PlannedDataConf()
    for name in ("num_workers", "max_tokens", "min_pixels", "max_pixels", "global_batch_size"):
        assert signature[name].default == getattr(schema, name), name


def test_a_read_only_data_folder_is_served_from_the_users_cache(
    tmp_path: Path, user_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folder_source(tmp_path / "data")
    # Permissions do not bind the superuser, under whom tests may run.
    real = cache_file.is_writable
    monkeypatch.setattr(
        cache_file,
        "is_writable",
        lambda folder: tmp_path / "data" not in folder.parents and real(folder),
    )
    datamodule = ready(source, tokenizer=None)
    assert len(list(user_cache.iterdir())) == 2
    assert len(datamodule.dataset) == 12
    other = make(ParquetSource(tmp_path / "data"), tokenizer=None)
    other.setup()
    assert len(other.dataset) == 12


def test_an_explicit_cache_folder_is_used(tmp_path: Path, user_cache: Path) -> None:
    ready(folder_source(tmp_path / "data"), cache_dir=str(tmp_path / "mine"))
    assert len(list((tmp_path / "mine").iterdir())) == 1
    assert not user_cache.exists()
    assert not (tmp_path / "data" / ".entrain").exists()


# --- bad input ------------------------------------------------------------------------------------


def bad_samples() -> ListSource:
    good = [((picture(50, 50),), turns("a|b"))] * 8
    return ListSource([*good, ((b"text",), turns("a|b")), ((), turns("a|" + "long " * 40))])


def test_samples_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(SampleError, match="Sample 8 of list: 4 bytes are not a readable image"):
        make(bad_samples()).prepare_data()
    source = bad_samples()
    del source.samples[8]
    with pytest.raises(SampleError, match=r"Sample 8 of list has 204 tokens\..*max_tokens is 100"):
        make(source, max_tokens=100).prepare_data()
    ready(source, max_tokens=204)
    # The limit is no part of the index: it is checked when that is read as well.
    with pytest.raises(SampleError, match="max_tokens is 203"):
        make(source, max_tokens=203).setup()


def test_samples_that_cannot_be_used_are_left_out_on_request(tmp_path: Path) -> None:
    datamodule = make(bad_samples(), max_tokens=100, on_bad_sample="skip", val_fraction=0)
    datamodule.prepare_data()
    with pytest.warns(UserWarning, match=r"2 of 10 samples .* left out. The first: Sample 8"):
        datamodule.setup()
    assert datamodule.num_skipped == 2
    assert [batch.num_samples for batch in datamodule.train_dataloader()] == [4, 4]
    seen = {i for batch in datamodule.train_dataloader() for i in batch.sample_indices}
    assert seen == set(range(8))


def test_a_skipped_sample_in_the_middle_shifts_no_other() -> None:
    samples = [((picture(56, 56 + 28 * i),), turns(f"q|{i}")) for i in range(6)]
    samples[2] = ((b"text",), turns("q|2"))
    options = {"on_bad_sample": "skip", "val_fraction": 0, "shuffle": False}
    datamodule = ready(ListSource(samples), **options)
    batch = next(iter(datamodule.train_dataloader()))
    assert [size.num_vision_tokens for size in batch.sizes] == [4, 6, 10, 12]
    answers = [row[row > 3].tolist() for row in batch.labels.values()]
    assert [chr(i - 4) for row in answers for i in row] == ["0", "1", "3", "4"]


def test_too_little_data_for_one_global_batch_is_named() -> None:
    datamodule = make(SyntheticSource(22), global_batch_size=21)
    datamodule.prepare_data()
    with pytest.raises(DataError, match=r"20 samples are left .* of 22 .*global batch of 21"):
        datamodule.setup()


def test_a_missing_folder_ends_preparation(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        make(ParquetSource(tmp_path / "nowhere")).prepare_data()


def test_a_process_that_does_not_see_the_index_says_so() -> None:
    with pytest.raises(DataError, match=r"size index .* missing or damaged.*prepare_data\(\)"):
        make().setup()


@pytest.mark.parametrize(
    "options",
    [
        {"seed": -1},
        {"val_fraction": 1.0},
        {"val_fraction": 0.6, "test_fraction": 0.4},
        {"max_tokens": 0},
        {"on_bad_sample": "ignore"},
        {"num_workers": -1},
        {"assignment": "best"},
        {"max_pixels": 100},
        {"micro_batch_size": 2},
    ],
)
def test_options_are_checked_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        make(**options)


def test_a_checkpoint_of_other_data_gives_a_warning() -> None:
    state = ready().state_dict()
    ready().load_state_dict(state)
    other = ready(SyntheticSource(22, seed=1, max_side=60))
    with pytest.warns(UserWarning, match="made with another source"):
        other.load_state_dict(state)


# --- charts ---------------------------------------------------------------------------------------


def test_charts_are_drawn_measured_and_batched_in_one_go(tmp_path: Path) -> None:
    source = ChartSource(
        10,
        max_side=200,
        text_only_fraction=0.2,
        num_workers=1,
        cache_dir=str(tmp_path),
        progress=False,
    )
    datamodule = make(source, tokenizer=None, max_pixels=50_176)
    datamodule.prepare_data()
    batch = next(iter(datamodule.train_dataloader()))
    text = datamodule.tokenizer.decode(batch.input_ids[0, 0].tolist())
    assert "<otsl><ched>" in text
    assert datamodule.tokenizer.vocab_size > 260
    assert sum(not size.has_images for size in datamodule.dataset.sizes) == 2
    shutil.rmtree(tmp_path)
