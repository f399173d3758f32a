"""Train a small vision-language model on charts, its encoder and its LLM on a process each.

Run `python examples/train_vlm.py`, or on one process `python examples/train_vlm.py 1`.
"""

import sys

import lightning.pytorch as pl
import torch

from lightning_entrain import EntrainDataModule, EntrainStrategy
from lightning_entrain.data.charts.source import ChartSource
from lightning_entrain.models.tiny import tiny_vlm


class ChartReader(pl.LightningModule):
    """A plain LightningModule: it knows nothing of stages and processes."""

    def __init__(self, tokenizer):
        super().__init__()
        self.model = tiny_vlm(tokenizer.vocab_size, tokenizer.image_token_id)

    def training_step(self, batch, batch_idx):
        """Loss of one global batch."""
        loss = self.model(batch)
        self.log("train/loss", loss, prog_bar=True, batch_size=batch.num_samples)
        return loss

    def configure_optimizers(self):
        """One optimizer for the whole model."""
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def main(devices=2, num_charts=64, max_steps=12):
    """Draw charts, then train."""
    data = EntrainDataModule(ChartSource(num_charts), max_pixels=50176)
    data.prepare_data()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=EntrainStrategy(),
        max_steps=max_steps,
        log_every_n_steps=1,
    )
    trainer.fit(ChartReader(data.tokenizer), datamodule=data)
    return trainer


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
