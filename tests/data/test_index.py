from __future__ import annotations

import errno
import logging
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_entrain.data import cache
from lightning_entrain.data.cache import cache_root, write_atomically
from lightning_entrain.data.dataset import measure_sample
from lightning_entrain.data.index import BadSample, SizeTable, build_index, index_path
from lightning_entrain.data.synthetic import SyntheticSource
from lightning_entrain.data.tokenizer import ByteTokenizer
from lightning_entrain.errors import DataError, SampleError
from lightning_entrain.workload.image_rule import ImageRule
from tests.data.helpers import ListSource, picture, turns

RULE = ImageRule()


def build(folder: Path, source: Any, *, skip: bool = False, rule: ImageRule = RULE) -> SizeTable:
    path = index_path(folder, source, ByteTokenizer(), rule)
    return build_index(path, source, ByteTokenizer(), rule, skip_bad=skip, progress=False)


def good_and_bad() -> ListSource:
    good, image = turns("a|b"), picture(56, 56)
    return ListSource(
        [
            ((image,), good),
            ((b"no image",), good),
            ((image,), turns("a|")),
            ((image, picture(2100, 10)), good),
            ((), good),
        ]
    )


def test_a_table_holds_the_sizes_that_were_measured(tmp_path: Path) -> None:
    source = SyntheticSource(12)
    table = build(tmp_path, source)
    sizes = [measure_sample(source, i, ByteTokenizer(), RULE) for i in range(12)]
    assert list(table) == sizes
    assert table[2:5] == sizes[2:5]
    assert table.num_tokens().tolist() == [size.num_tokens for size in sizes]
    assert table.rows.tolist() == list(range(12))
    for wrong in (-1, 12):
        with pytest.raises(IndexError):
            table[wrong]
    assert list(pickle.loads(pickle.dumps(table))) == sizes
    fewer = table.without([BadSample(3, "bad", "", "")])
    assert list(fewer) == sizes[:3] + sizes[4:]
    assert [sample.row for sample in fewer.bad] == [3]


def test_samples_are_measured_once(tmp_path: Path) -> None:
    source = ListSource([((picture(56, 84),), turns("a|b"))] * 3)
    first = build(tmp_path, source)
    assert source.num_measured == 3
    again = build(tmp_path, source)
    assert source.num_measured == 3
    assert list(again) == list(first)
    assert len(list(tmp_path.iterdir())) == 1


def test_the_index_is_rebuilt_when_data_rule_or_tokenizer_change(tmp_path: Path) -> None:
    class Other(ByteTokenizer):
        def fingerprint(self) -> str:
            return "other"

    source = ListSource([((picture(56, 84),), turns("a|b"))])
    names = {
        index_path(tmp_path, source, ByteTokenizer(), RULE),
        index_path(tmp_path, source, Other(), RULE),
        index_path(tmp_path, source, ByteTokenizer(), ImageRule(max_pixels=200_704)),
    }
    build(tmp_path, source)
    source.samples.append(((), turns("c|de")))
    names.add(index_path(tmp_path, source, ByteTokenizer(), RULE))
    assert len(names) == 4
    assert len(build(tmp_path, source)) == 2
    smaller = build(tmp_path, source, rule=ImageRule(min_pixels=28 * 28))
    assert smaller[0].num_patches == 24
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("damage", ["empty", "text", "truncated", "flipped", "other arrays"])
def test_a_damaged_index_is_named_and_replaced(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = SyntheticSource(12)
    table = build(tmp_path, source)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    if damage == "other arrays":
        np.savez(path, rows=np.arange(3))
    else:
        middle = len(whole) // 4
        flipped = whole[:middle] + bytes(255 - x for x in whole[middle : middle + 40])
        broken = {
            "empty": b"",
            "text": b"sizes",
            "truncated": whole[:-20],
            "flipped": flipped + whole[middle + 40 :],
        }
        path.write_bytes(broken[damage])
    with pytest.raises(DataError, match=rf"The size index {path} is missing or damaged"):
        SizeTable.load(path)
    with caplog.at_level(logging.WARNING):
        assert list(build(tmp_path, source)) == list(table)
    assert "Measuring anew" in caplog.text
    assert list(SizeTable.load(path)) == list(table)


def test_the_first_bad_sample_is_named_and_nothing_is_cached(tmp_path: Path) -> None:
    with pytest.raises(SampleError, match="Sample 1 of list: 8 bytes are not a readable image"):
        build(tmp_path, good_and_bad())
    assert list(tmp_path.iterdir()) == []


def test_bad_samples_are_skipped_on_request_and_remembered(tmp_path: Path) -> None:
    source = good_and_bad()
    for table in (build(tmp_path, source, skip=True), build(tmp_path, source, skip=True)):
        assert table.rows.tolist() == [0, 4]
        assert [sample.row for sample in table.bad] == [1, 2, 3]
        assert [len(size.grids) for size in table] == [1, 0]
        reasons = [sample.value for sample in table.bad]
        assert "not a readable image" in reasons[0]
        assert "assistant text of turn 0 is empty" in reasons[1]
        assert "aspect ratio of 210" in reasons[2]
    with pytest.raises(SampleError, match="Sample 1 of list: 8 bytes"):
        build(tmp_path, source)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_no_index(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(cache.os, "fsync", full)
        with pytest.raises(DataError, match=r"The disk is full: .*sizes-.*pass cache_dir or set"):
            build(tmp_path, SyntheticSource(3))
    assert list(tmp_path.iterdir()) == []
    assert len(build(tmp_path, SyntheticSource(3))) == 3


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EPERM])
def test_a_folder_that_cannot_be_written_is_named(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: Any, **options: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(cache.tempfile, "mkstemp", refused)
    with pytest.raises(
        DataError, match=rf"{tmp_path}.* cannot be written .*LIGHTNING_ENTRAIN_CACH"
    ):
        write_atomically(tmp_path / "file", lambda file: None)


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        write_atomically(tmp_path / "file" / "below", lambda file: None)


def test_a_file_is_replaced_only_when_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, lambda file: file.write(b"first") and None)

    def fail(file: Any) -> None:
        file.write(b"second")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, fail)
    assert path.read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["file"]
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask


def test_the_cache_folder_is_the_option_the_variable_or_the_users(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LIGHTNING_ENTRAIN_CACHE", "/variable")
    assert cache_root("/option") == Path("/option")
    assert cache_root() == Path("/variable")
    monkeypatch.delenv("LIGHTNING_ENTRAIN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_root() == Path("/xdg/lightning_entrain")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path.home() / ".cache" / "lightning_entrain"
