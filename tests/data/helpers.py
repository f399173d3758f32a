from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from lightning_entrain.data.parquet import write_samples
from lightning_entrain.data.records import Turn


def picture(width: int, height: int, kind: str = "PNG", colour: str = "red") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(file, kind)
    return file.getvalue()


def turns(*pairs: str) -> tuple[Turn, ...]:
    return tuple(Turn(*pair.split("|")) for pair in pairs)


def write_folder(
    folder: Path,
    samples: Sequence[tuple[Sequence[bytes], Sequence[Turn]]],
    name: str = "a.parquet",
    group_size: int = 2,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / name, "wb") as file:
        write_samples(file, samples, group_size=group_size)
    return folder


class ListSource:
    """Samples given one by one."""

    def __init__(self, samples: Sequence[tuple[Sequence[bytes], Sequence[Turn]]]) -> None:
        self.name = "list"
        self.samples = list(samples)
        self.num_measured = 0

    def prepare(self) -> None:
        pass

    def fingerprint(self) -> str:
        return repr(self.samples)

    def __len__(self) -> int:
        return len(self.samples)

    def texts(self, index: int) -> tuple[Turn, ...]:
        self.num_measured += 1
        return tuple(self.samples[index][1])

    def images(self, index: int) -> tuple[bytes, ...]:
        return tuple(self.samples[index][0])
