"""How the apps show progress: a bar in a terminal, a few lines in a file."""

from __future__ import annotations

import sys
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, RichProgressBar
from rich.progress import BarColumn

from lightning_entrain.observe.history import history_of

_SHORT_NAMES = {"train/loss": "loss", "val/loss": "val"}
_BAR_WIDTH = 10


def progress_callback() -> Callback:
    """A bar where standard output is a terminal, else a few lines."""
    return StepProgressBar() if sys.stdout.isatty() else StepLines()


class StepProgressBar(RichProgressBar):
    """A progress bar that counts optimizer steps where the trainer counts them, not epochs."""

    def get_metrics(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """The logged values without the logger's version, and how balanced the run is.

        Names and numbers are short, for all of it has to fit into one line of a terminal.
        """
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        named = {_SHORT_NAMES.get(name, name): value for name, value in metrics.items()}
        return {**named, **balance(trainer, short=True)}

    def configure_columns(self, trainer: pl.Trainer) -> list[Any]:
        """Lightning's columns; the bar itself leaves its room to the values."""
        columns = super().configure_columns(trainer)
        for column in columns:
            if isinstance(column, BarColumn):
                column.bar_width = _BAR_WIDTH
        return columns

    def _get_train_description(self, current_epoch: int) -> str:
        max_steps = self.trainer.max_steps
        if max_steps <= 0:
            return super()._get_train_description(current_epoch)
        return f"to step {max_steps}"


class StepLines(Callback):
    """Prints a line now and then: step, losses, spread of the microbatches, bubble.

    Args:
        num_lines: About how many lines a run of known length gets.
    """

    def __init__(self, num_lines: int = 10) -> None:
        self.num_lines = num_lines

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Print, on rank 0, at the first step and then at even distances."""
        total, step = trainer.max_steps, trainer.global_step
        distance = max(total // self.num_lines, 1) if total > 0 else 10
        if not trainer.is_global_zero or (step != 1 and step % distance and step != total):
            return
        values = trainer.callback_metrics
        text = f"step {step}" + (f"/{total}" if total > 0 else "")
        for name in ("train/loss", "val/loss"):
            if name in values:
                text += f"  {name} {float(values[name]):.4f}"
        for name, value in balance(trainer).items():
            text += f"  {name} {value}"
        print(text, flush=True)


def balance(trainer: pl.Trainer, *, short: bool = False) -> dict[str, str]:
    """Spread of the microbatches, encoder/LLM, and the pipeline's bubble, as monitors found them.

    Empty without the monitors. The bubble is measured now and then, so it comes with the step that
    it is of, counted from 1 as the progress is.
    """
    values, found = trainer.callback_metrics, {}
    spreads = [values.get(f"variability/{module}_cv") for module in ("encoder", "llm")]
    if all(spread is not None for spread in spreads):
        form, name = (".0%", "cv enc/LLM") if short else (".1%", "cv encoder/LLM")
        found[name] = "/".join(
            f"{float(spread):{form}}" for spread in spreads if spread is not None
        )
    bubble = values.get("pipeline/bubble_ratio")
    if bubble is not None:
        step = history_of(trainer).newest_step.get("pipeline/bubble_ratio")
        measured_at = ""
        if step is not None:
            measured_at = f" @{step + 1}" if short else f" (at step {step + 1})"
        found["bubble"] = f"{float(bubble):.0%}{measured_at}"
    return found
