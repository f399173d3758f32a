"""A run leaves a checkpoint of its last step, whenever it validates."""

import pytest
import torch

from lightning_entrain.callbacks.checkpoint import RunCheckpoint


@pytest.mark.parametrize("max_steps", [2, 3])
def test_last_is_written_at_the_last_step_in_the_middle_of_an_epoch(
    max_steps, fit, batches, tmp_path
):
    callback = RunCheckpoint(dirpath=tmp_path / "ckpt", monitor="val/loss", save_last=True)
    fit(batches, [callback], False, max_steps=max_steps, enable_checkpointing=True)
    found = torch.load(tmp_path / "ckpt" / "last.ckpt", weights_only=False)
    assert found["global_step"] == max_steps
    # Resuming goes on with the next batch of the same epoch.
    progress = found["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]
    assert progress["ready"] == max_steps
    assert callback.last_model_path == str(tmp_path / "ckpt" / "last.ckpt")


def test_the_last_step_replaces_an_earlier_save(fit, batches, tmp_path):
    """Lightning's own leaves the file of step 2."""
    callback = RunCheckpoint(dirpath=tmp_path, monitor=None, save_last=True, every_n_train_steps=2)
    fit(batches, [callback], False, max_steps=3, enable_checkpointing=True)
    assert torch.load(tmp_path / "last.ckpt", weights_only=False)["global_step"] == 3


def test_a_second_run_replaces_the_file(fit, batches, tmp_path):
    for max_steps in (1, 2):
        callback = RunCheckpoint(dirpath=tmp_path, monitor=None, save_last=True)
        fit(batches, [callback], False, max_steps=max_steps, enable_checkpointing=True)
    assert torch.load(tmp_path / "last.ckpt", weights_only=False)["global_step"] == 2
    assert not list(tmp_path.glob("last-v*.ckpt"))


def test_save_last_false_is_respected(fit, batches, tmp_path):
    callback = RunCheckpoint(dirpath=tmp_path, monitor="val/loss", save_last=False)
    fit(batches, [callback], False, max_steps=2, enable_checkpointing=True)
    assert not list(tmp_path.glob("*.ckpt"))
