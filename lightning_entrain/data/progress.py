"""One look for the progress bars of long preparations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)


@contextmanager
def progress_bar(label: str, total: int, *, show: bool = True) -> Iterator[Callable[[], None]]:
    """Show a bar on standard error while the block runs.

    Args:
        label: What is being done.
        total: Number of steps.
        show: False shows nothing.

    Yields:
        A function to call once per step.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not show) as progress:
        task = progress.add_task(label, total=total)
        yield lambda: progress.advance(task)
