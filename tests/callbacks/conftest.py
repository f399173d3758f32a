import types

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_entrain.assign.types import Assignment, ReplicaAssignment
from lightning_entrain.workload.sizes import SampleSize


class Line(pl.LightningModule):
    """One weight; the loss of step n is n + 1."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def training_step(self, batch, batch_idx):
        loss = self.weight * 0.0 + batch_idx + 1.0
        self.log("train/loss", loss, batch_size=1)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return batch


def planned(num_patches, num_text_tokens):
    """A batch of one sample per microbatch, with these patches and text tokens."""
    sizes = tuple(
        SampleSize(grids=((1, 2, p // 2),) if p else (), num_text_tokens=t, num_label_tokens=1)
        for p, t in zip(num_patches, num_text_tokens, strict=True)
    )
    replica = ReplicaAssignment(
        encoder=tuple((i,) if p else () for i, p in enumerate(num_patches)),
        llm=tuple((i,) for i in range(len(sizes))),
    )
    return types.SimpleNamespace(
        assignment=Assignment(replicas=(replica,), policy="fixed"),
        sizes=sizes,
        num_samples=len(sizes),
        num_tokens=sum(size.num_tokens for size in sizes),
    )


@pytest.fixture
def batches():
    return [
        planned([4, 12], [1, 5]),
        planned([0, 8], [3, 3]),
        planned([8, 8], [2, 2]),
        planned([0, 0], [6, 2]),
    ]


@pytest.fixture
def fit(tmp_path):
    def run(batches, callbacks, loggers, **options):
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            logger=loggers,
            callbacks=callbacks,
            enable_model_summary=False,
            default_root_dir=tmp_path,
            **{"enable_checkpointing": False, "enable_progress_bar": False, **options},
        )
        loader = torch.utils.data.DataLoader(batches, batch_size=None)
        trainer.fit(Line(), loader)
        return trainer

    return run
