from __future__ import annotations

from pathlib import Path

import pytest

from lightning_entrain.data.charts.source import ChartSource


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_ENTRAIN_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def charts(tmp_path_factory: pytest.TempPathFactory) -> ChartSource:
    """A small corpus, drawn once for all tests."""
    source = ChartSource(
        20,
        max_side=300,
        text_only_fraction=0.2,
        cache_dir=str(tmp_path_factory.mktemp("charts")),
        num_workers=2,
        progress=False,
    )
    source.prepare()
    return source
