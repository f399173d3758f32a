"""Where in its epochs a checkpoint says that training was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def mend_epoch_end(checkpoint: Mapping[str, Any]) -> None:
    """Let Lightning go on with the right epoch from a checkpoint saved after an epoch's last hooks.

    Lightning ends the epoch once more when it resumes, which is right for what it saves during
    validation, when the epoch does not count as processed yet. What it saves later (in
    ``on_train_epoch_end``, or when asked to stop) counts it as processed already; samplers would
    then be told an epoch too many. Such a state becomes one of the first kind, in place.

    Args:
        checkpoint: A loaded Lightning checkpoint.
    """
    fit_loop = checkpoint.get("loops", {}).get("fit_loop", {})
    epochs = fit_loop.get("epoch_progress", {})
    batches = fit_loop.get("epoch_loop.batch_progress", {})
    if not batches.get("is_last_batch") or batches["current"]["completed"] == 0:
        return
    for counts in epochs.values():
        if 0 < counts["ready"] == counts["processed"]:
            counts["processed"] = counts["completed"] = counts["ready"] - 1
