from __future__ import annotations

import os
import pickle
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lightning_entrain.data import parquet
from lightning_entrain.data.parquet import ParquetSource
from lightning_entrain.data.records import Source, Turn
from lightning_entrain.errors import ConfigError, DataError, SampleError
from tests.data.helpers import turns, write_folder

SAMPLES = [((f"image {i}".encode(),) * (i % 3), turns(f"q{i}|a{i}")) for i in range(7)]


def test_samples_are_found_in_the_order_of_file_names(tmp_path: Path) -> None:
    write_folder(tmp_path / "b", SAMPLES[4:], "x.parquet", group_size=1)
    write_folder(tmp_path / "a", SAMPLES[:4], "z.parquet", group_size=3)
    source = ParquetSource(tmp_path)
    assert isinstance(source, Source)
    source.prepare()
    assert len(source) == 7
    for i in (6, 0, 3, 4, 5, 2, 1):
        assert source.images(i) == SAMPLES[i][0]
        assert source.texts(i) == SAMPLES[i][1]
    for i in (-1, 7):
        with pytest.raises(IndexError):
            source.texts(i)
    assert len(ParquetSource(tmp_path, max_samples=5)) == 5


def test_other_layouts_of_the_columns_are_read(tmp_path: Path) -> None:
    table = pa.table(
        {
            "id": [1, 2],
            "pictures": pa.array([[b"one", b"two"], None], pa.list_(pa.binary())),
            "talk": [
                [{"user": "u", "assistant": "a", "source": "s"}],
                [{"user": None, "assistant": "b", "source": "s"}],
            ],
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    source = ParquetSource(tmp_path, image_column="pictures", text_column="talk")
    assert [source.images(i) for i in (0, 1)] == [(b"one", b"two"), ()]
    assert [source.texts(i) for i in (0, 1)] == [(Turn("u", "a"),), (Turn("", "b"),)]
    with pytest.raises(DataError, match="no column 'images'; it has 'id', 'pictures', 'talk'"):
        len(ParquetSource(tmp_path))


NO_IMAGES = pa.array([[]], pa.list_(pa.binary()))
NO_TURNS = pa.array([[]], parquet.SCHEMA.field("texts").type)


@pytest.mark.parametrize(
    ("images", "texts", "message"),
    [
        ([1], NO_TURNS, r"column 'images' is of type int64\. Limit: a list of structs .*bytes"),
        (["a"], NO_TURNS, "column 'images' is of type string"),
        ([[{"url": "x"}]], NO_TURNS, "column 'images' is of type list<.*url"),
        (NO_IMAGES, ["a"], r"column 'texts' is of type string\. Limit: a list of structs .*user"),
        (NO_IMAGES, [["a"]], "column 'texts' is of type list<"),
        (NO_IMAGES, [[{"user": 1, "assistant": 2}]], "column 'texts' is of type list<"),
        (NO_IMAGES, [[{"human": "a", "gpt": "b"}]], "Remedy: convert it, or .* by text_column"),
    ],
)
def test_columns_of_another_type_are_refused(
    tmp_path: Path, images: object, texts: object, message: str
) -> None:
    pq.write_table(pa.table({"images": images, "texts": texts}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=message):
        ParquetSource(tmp_path).prepare()


def test_an_image_that_is_only_a_path_is_named(tmp_path: Path) -> None:
    rows = [{"images": [{"bytes": None, "path": "a.png"}], "texts": []}]
    pq.write_table(pa.Table.from_pylist(rows, schema=parquet.SCHEMA), tmp_path / "a.parquet")
    with pytest.raises(SampleError, match=r"Sample 0 of .* has an image without bytes"):
        ParquetSource(tmp_path).images(0)


def test_texts_are_read_without_images_and_the_other_way_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    real = pq.ParquetFile.read_row_group

    def noting(self: pq.ParquetFile, number: int, columns: list[str], **options: bool) -> pa.Table:
        read.extend(columns)
        return real(self, number, columns=columns, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", noting)
    source = ParquetSource(write_folder(tmp_path, SAMPLES))
    source.texts(1)
    assert read == ["texts"]
    source.images(1)
    source.images(0)
    assert read == ["texts", "images"]


def test_rows_kept_in_memory_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    big = [((bytes(1000),), turns("q|a")) for _ in range(20)]
    source = ParquetSource(write_folder(tmp_path, big, group_size=1))
    monkeypatch.setattr(parquet, "_CACHED_BYTES", 5500)
    for i in range(20):
        source.images(i)
    assert 2 <= len(source._cached) <= 5


def test_open_files_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "_OPEN_FILES", 2)
    for i in range(7):
        write_folder(tmp_path, SAMPLES[i : i + 1], f"{i}.parquet")
    source = ParquetSource(tmp_path)
    assert [source.texts(i) for i in range(7)] == [sample[1] for sample in SAMPLES]
    assert len(source._files) <= 2


def test_a_copy_in_another_process_opens_its_own_files(tmp_path: Path) -> None:
    source = ParquetSource(write_folder(tmp_path, SAMPLES))
    source.images(2)
    data = pickle.dumps(source)
    assert b"image 2" not in data
    copy = pickle.loads(data)
    assert copy.images(2) == SAMPLES[2][0]
    assert copy.fingerprint() == source.fingerprint()


def test_the_fingerprint_changes_with_the_files(tmp_path: Path) -> None:
    source = ParquetSource(write_folder(tmp_path, SAMPLES))
    prints = [source.fingerprint()]
    assert source.fingerprint() == prints[0]
    (tmp_path / "notes.txt").write_text("no sample")
    assert source.fingerprint() == prints[0]
    os.utime(tmp_path / "a.parquet", ns=(1, 1))
    prints.append(source.fingerprint())
    write_folder(tmp_path, SAMPLES[:2], "b.parquet")
    prints.append(source.fingerprint())
    (tmp_path / "b.parquet").rename(tmp_path / "c.parquet")
    prints.append(source.fingerprint())
    prints.append(ParquetSource(tmp_path, max_samples=1).fingerprint())
    assert len(set(prints)) == 5
    source.prepare()
    assert len(source) == 9


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(DataError, match=rf"{missing} does not exist.*check the path"):
        ParquetSource(missing).prepare()
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / ".half.parquet").write_bytes(b"PAR1")  # how a file being written is named
    with pytest.raises(DataError, match=rf"{empty} holds no parquet file.*at least one"):
        ParquetSource(empty).prepare()
    with pytest.raises(DataError, match="hold no sample"):
        ParquetSource(write_folder(tmp_path / "no_rows", [])).prepare()
    with pytest.raises(ConfigError, match="max_samples is 0"):
        ParquetSource(empty, max_samples=0)


@pytest.mark.parametrize("damage", ["truncated", "text", "empty", "middle"])
def test_a_damaged_file_is_named(damage: str, tmp_path: Path) -> None:
    path = write_folder(tmp_path, SAMPLES) / "a.parquet"
    whole = path.read_bytes()
    broken = {
        "truncated": whole[: len(whole) // 2],
        "text": b"these are no columns " * 20,
        "empty": b"",
        "middle": whole[:4] + bytes(len(whole) // 2) + whole[4 + len(whole) // 2 :],
    }
    path.write_bytes(broken[damage])
    with pytest.raises(DataError, match=rf"{path} is damaged or no parquet file"):
        ParquetSource(tmp_path).images(1)
