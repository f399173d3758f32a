"""What the progress tells is of the step it names."""

import io
import re

from rich.console import Console

from lightning_entrain.callbacks.monitor import StepMonitor, step_index
from lightning_entrain.callbacks.progress import StepLines, StepProgressBar
from lightning_entrain.observe.history import StepHistory, history_of


class Looks(StepMonitor):
    """Measures a bubble at the second and the third of four steps."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        step = step_index(trainer)
        if step in (1, 2):
            self.log_step(trainer, pl_module, {"pipeline/bubble_ratio": 0.1 * step})


def test_lines_say_at_which_step_the_bubble_was_measured(fit, batches, capsys):
    trainer = fit(batches, [Looks(), StepLines()], False, max_steps=4)
    lines = re.findall(r"^step (\d)/4 .*?(?:bubble (.*))?$", capsys.readouterr().out, re.M)
    assert lines == [
        ("1", ""), ("2", "10% (at step 2)"), ("3", "20% (at step 3)"), ("4", "20% (at step 3)")
    ]  # fmt: skip
    bar = StepProgressBar()
    bar._trainer = trainer
    assert bar.get_metrics(trainer, trainer.lightning_module)["bubble"] == "20% @3"
    assert history_of(trainer).newest_step == {"pipeline/bubble_ratio": 2}


def test_the_bar_fits_into_a_line(fit, batches, monkeypatch):
    """With all its values, on 120 columns."""
    lines = []
    monkeypatch.setattr(StepProgressBar, "_stop_progress", lambda self: lines.append(shown(self)))
    values = {"pipeline/bubble_ratio": 0.4612}
    values |= {"variability/encoder_cv": 0.2204, "variability/llm_cv": 0.3461}

    class Values(StepMonitor):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.log_step(trainer, pl_module, values)
            pl_module.log_dict({"train/loss": 6.5, "val/loss": 6.1}, prog_bar=True, batch_size=1)

    def shown(bar):
        console = Console(width=120, file=io.StringIO(), force_terminal=False)
        console.print(bar.progress.get_renderable())
        return console.file.getvalue()

    bar = StepProgressBar()
    fit(batches, [Values(), bar], False, max_steps=4, enable_progress_bar=True)
    (line,) = lines[-1].strip().splitlines()
    assert line.startswith("to step 4")
    for part in ("loss: 6.500", "val: 6.100", "cv enc/LLM: 22%/35%", "bubble: 46% @4"):
        assert part in line


def test_a_thinned_history_still_knows_the_newest_step():
    history = StepHistory(max_steps=4)
    for step in range(8):
        history.add(step, {"a": float(step)})
    assert sorted(history.rows) == [0, 2, 4, 6]
    assert history.newest_step == {"a": 7}
