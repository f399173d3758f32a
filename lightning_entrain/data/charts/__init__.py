"""Charts drawn from real tables, each with its table as OTSL text. Needs the extra ``demo``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_entrain.datamodule import EntrainDataModule


def charts_datamodule(
    *,
    num_samples: int = 256,
    chart_seed: int = 0,
    min_side: int = 60,
    max_side: int = 3000,
    text_only_fraction: float = 0.05,
    draw_workers: int | None = None,
    max_pixels: int = 200_704,
    cache_dir: str | None = None,
    progress: bool = True,
    **options: Any,
) -> EntrainDataModule:
    """The chart corpus as a data module, with images small enough to train on a CPU.

    Args:
        num_samples: Number of charts.
        chart_seed: Same seed, same charts.
        min_side: Longer side of the smallest charts, in pixels.
        max_side: Longer side of the largest charts, in pixels.
        text_only_fraction: Share of samples that give the table as text instead of a chart.
        draw_workers: Processes that draw; default: one per core.
        max_pixels: Largest area of an image after resizing; the default is 256 vision tokens.
        cache_dir: Folder for the corpus and all that is derived from it.
        progress: Whether to show progress bars.
        **options: Further arguments of :class:`EntrainDataModule`.
    """
    # Imported late: the processes that draw charts have no use for torch.
    from lightning_entrain.data.charts.source import ChartSource
    from lightning_entrain.datamodule import EntrainDataModule

    source = ChartSource(
        num_samples,
        seed=chart_seed,
        min_side=min_side,
        max_side=max_side,
        text_only_fraction=text_only_fraction,
        cache_dir=cache_dir,
        num_workers=draw_workers,
        progress=progress,
    )
    return EntrainDataModule(source, max_pixels=max_pixels, progress=progress, **options)
