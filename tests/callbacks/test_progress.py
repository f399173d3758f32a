"""What the progress tells is of the step it names."""

import re

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
    assert lines == [("1", ""), ("2", "10% (step 2)"), ("3", "20% (step 3)"), ("4", "20% (step 3)")]
    bar = StepProgressBar()
    bar._trainer = trainer
    assert bar.get_metrics(trainer, trainer.lightning_module)["bubble"] == "20% (step 3)"
    assert history_of(trainer).newest_step == {"pipeline/bubble_ratio": 2}


def test_a_thinned_history_still_knows_the_newest_step():
    history = StepHistory(max_steps=4)
    for step in range(8):
        history.add(step, {"a": float(step)})
    assert sorted(history.rows) == [0, 2, 4, 6]
    assert history.newest_step == {"a": 7}
