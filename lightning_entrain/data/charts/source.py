"""The chart corpus as a data source: drawn once, cached, then read."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Generator, Sequence
from contextlib import closing
from importlib.metadata import PackageNotFoundError, version
from typing import BinaryIO

from lightning_entrain.data.cache import cache_root, short_digest, write_atomically
from lightning_entrain.data.charts.pool import draw_samples
from lightning_entrain.data.charts.sample import GENERATOR_VERSION, ChartOptions
from lightning_entrain.data.parquet import ParquetSource, write_samples
from lightning_entrain.data.progress import progress_bar
from lightning_entrain.data.records import Turn
from lightning_entrain.errors import ConfigError, DataError

_log = logging.getLogger(__name__)


class ChartSource:
    """Charts of real tables, in the manner of SynthChartNet, with the table as OTSL text.

    They are drawn by :meth:`prepare`, the first time only, and cached as parquet in FineVision's
    schema. The same arguments and package versions give the same bytes.

    Args:
        num_samples: Number of samples.
        seed: Same seed, same charts.
        min_side: Longer side of the smallest charts, in pixels.
        max_side: Longer side of the largest charts, in pixels.
        text_only_fraction: Share of samples that give the table as text instead of a chart.
        cache_dir: Folder for caches; default: the environment variable LIGHTNING_ENTRAIN_CACHE or
            the user's cache folder.
        num_workers: Processes that draw; default: one per core.
        progress: Whether to show a progress bar while drawing.
    """

    def __init__(
        self,
        num_samples: int = 256,
        *,
        seed: int = 0,
        min_side: int = 60,
        max_side: int = 3000,
        text_only_fraction: float = 0.0,
        cache_dir: str | None = None,
        num_workers: int | None = None,
        progress: bool = True,
    ) -> None:
        if num_samples < 1:
            raise ConfigError(f"num_samples is {num_samples}", limit="at least 1")
        if num_workers is not None and num_workers < 1:
            raise ConfigError(f"num_workers is {num_workers}", limit="at least 1")
        self.num_samples = num_samples
        self.options = ChartOptions(
            seed=seed,
            min_side=min_side,
            max_side=max_side,
            text_only_fraction=text_only_fraction,
        )
        self.name = f"charts({num_samples}, seed={seed})"
        self.num_workers = num_workers
        self.progress = progress
        packages = ("matplotlib", "pillow", "pyarrow", "vega_datasets")
        versions = [f"{package}={_version(package)}" for package in packages]
        digest = short_digest(
            f"{GENERATOR_VERSION}", f"{num_samples}", self.options.fingerprint(), *versions
        )
        self.folder = cache_root(cache_dir) / f"charts-{digest}"
        self._file = self.folder / "charts.parquet"
        self._manifest = self.folder / "manifest.json"
        self._parquet = ParquetSource(self.folder)

    def prepare(self) -> None:
        """Draw the corpus unless it is cached whole.

        Raises:
            DataError: If the cache cannot be written, or the extra ``demo`` is not installed.
        """
        if self._is_whole():
            return
        write_atomically(self._file, self._write)
        digest = hashlib.sha256(self._file.read_bytes()).hexdigest()
        manifest = {"sha256": digest, "num_samples": self.num_samples}
        text = json.dumps(manifest, indent=1) + "\n"
        write_atomically(self._manifest, lambda file: _write_text(file, text))
        self._parquet = ParquetSource(self.folder)

    def fingerprint(self) -> str:
        """Digest of the corpus's content."""
        try:
            return str(json.loads(self._manifest.read_text())["sha256"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"The chart corpus in {self.folder} is missing or damaged ({error})",
                limit="it is drawn before it is read",
                remedy="call prepare() on one process first; every process must see that folder",
            ) from error

    def __len__(self) -> int:
        return self.num_samples

    def texts(self, index: int) -> tuple[Turn, ...]:
        """The question and the table as OTSL."""
        return self._parquet.texts(index)

    def images(self, index: int) -> tuple[bytes, ...]:
        """The chart as a PNG file; nothing for a text-only sample."""
        return self._parquet.images(index)

    def _is_whole(self) -> bool:
        if not self._manifest.exists() and not self._file.exists():
            return False
        try:
            content = self._file.read_bytes()
            if hashlib.sha256(content).hexdigest() == self.fingerprint():
                return True
        except OSError:
            pass
        _log.warning(
            "The chart corpus in %s is incomplete or damaged; drawing it anew", self.folder
        )
        return False

    def _write(self, file: BinaryIO) -> None:
        # Closed at once if writing fails, or the processes that draw would wait on.
        with closing(self._draw()) as samples:
            write_samples(file, samples)

    def _draw(self) -> Generator[tuple[Sequence[bytes], Sequence[Turn]], None, None]:
        """Samples in order, each as soon as it and all before it are drawn."""
        num_workers = self.num_workers or os.cpu_count() or 1
        early: dict[int, tuple[Sequence[bytes], Sequence[Turn]]] = {}
        following = 0
        with (
            progress_bar("Drawing charts", self.num_samples, show=self.progress) as advance,
            closing(draw_samples(self.options, self.num_samples, num_workers)) as drawn,
        ):
            for index, sample in drawn:
                images = () if sample.image is None else (sample.image,)
                early[index] = images, (Turn(sample.user, sample.assistant),)
                advance()
                while following in early:
                    yield early.pop(following)
                    following += 1


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _write_text(file: BinaryIO, text: str) -> None:
    file.write(text.encode())
