from __future__ import annotations

import errno
import io
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lightning_entrain.data import cache
from lightning_entrain.data.charts import pool, source
from lightning_entrain.data.charts.otsl import otsl_to_table, table_to_otsl
from lightning_entrain.data.charts.sample import ChartOptions, ChartSample, make_sample
from lightning_entrain.data.charts.source import ChartSource
from lightning_entrain.data.charts.tables import _RECIPES, number_text, read_records
from lightning_entrain.errors import ConfigError, DataError, SampleError

LIKE_CHARTS: dict[str, Any] = {"max_side": 300, "text_only_fraction": 0.2, "progress": False}
SMALL = {"max_side": 160, "progress": False}


def workers_of(pid: int) -> list[int]:
    command = ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(pid)]
    found = subprocess.run(command, capture_output=True)
    lines = found.stdout.decode().splitlines()
    return [int(line.split()[0]) for line in lines if "charts.worker" in line]


def test_the_same_arguments_give_the_same_bytes_for_any_number_of_workers(
    charts: ChartSource, tmp_path: Path
) -> None:
    again = ChartSource(20, cache_dir=str(tmp_path), num_workers=1, **LIKE_CHARTS)
    assert again.folder.name == charts.folder.name
    again.prepare()
    name = "charts.parquet"
    assert (again.folder / name).read_bytes() == (charts.folder / name).read_bytes()
    assert again.fingerprint() == charts.fingerprint()


def test_another_seed_gives_other_charts(charts: ChartSource) -> None:
    options = charts.options
    assert make_sample(options, 3) == make_sample(options, 3)
    assert make_sample(replace(options, seed=1), 3) != make_sample(options, 3)
    others = [ChartSource(21), ChartSource(20, seed=1), ChartSource(20, min_side=61)]
    assert len({s.folder for s in [ChartSource(20), *others]}) == 4


def test_sizes_vary_widely_and_both_extremes_occur() -> None:
    options = ChartOptions()
    sizes = []
    for index in (0, 1, *range(2, 60, 6)):
        image = make_sample(options, index).image
        assert image is not None
        sizes.append(Image.open(io.BytesIO(image)).size)
    assert max(sizes[0]) == 3000
    assert max(sizes[1]) == 60
    assert len({max(size) // 300 for size in sizes}) >= 5


def test_the_answer_is_the_table_of_the_chart(charts: ChartSource) -> None:
    num_images = 0
    for index in range(len(charts)):
        (turn,) = charts.texts(index)
        header, *rows = otsl_to_table(turn.assistant)
        assert rows
        assert all(len(row) == len(header) >= 2 for row in rows)
        images = charts.images(index)
        num_images += len(images)
        if images:
            Image.open(io.BytesIO(images[0])).load()
        else:
            assert ", ".join(header) in turn.user
    assert num_images == 16


def test_tables_hold_numbers_of_the_shipped_files() -> None:
    years = {str(record["year"]): record for record in read_records("wheat.json")}
    wheat = next(
        table
        for recipe in _RECIPES
        for seed in range(3)
        if (table := recipe(random.Random(seed), 9)).header[0] == "Year" and "Wheat" in table.header
    )
    column = wheat.header.index("Wheat")
    assert wheat.rows
    for row in wheat.rows:
        assert float(row[column]) == pytest.approx(years[row[0]]["wheat"], rel=5e-3)


@pytest.mark.parametrize("number", range(len(_RECIPES)))
def test_every_recipe_makes_tables_that_can_be_drawn(number: int) -> None:
    from lightning_entrain.data.charts.draw import draw_chart

    for seed in range(40):
        table = _RECIPES[number](random.Random(seed), 2 + seed % 23)
        assert table.kinds
        assert all(len(row) == len(table.header) for row in table.rows)
        assert otsl_to_table(table_to_otsl(table.header, table.rows)) == [
            list(row) for row in (table.header, *table.rows)
        ]
    for kind in sorted(set(table.kinds)):
        data = draw_chart(table, kind, 120, 90, random.Random(0))
        assert Image.open(io.BytesIO(data)).size == (120, 90)


def test_otsl_is_read_back_and_its_tags_cannot_be_forged() -> None:
    text = table_to_otsl(("Year", "a<b>"), [("1565", ""), ("x", "4.5")])
    assert text == ("<otsl><ched>Year<ched>a(b)<nl><rhed>1565<ecel><nl><rhed>x<fcel>4.5<nl></otsl>")
    assert otsl_to_table(text) == [["Year", "a(b)"], ["1565", ""], ["x", "4.5"]]
    for wrong in ("", "table", "<otsl><ched>a", "<otsl></otsl>"):
        with pytest.raises(SampleError, match="is not an OTSL table"):
            otsl_to_table(wrong)


@pytest.mark.parametrize(
    ("value", "text"),
    [(3.14159, "3.14"), (123456.0, "123000"), (-0.00123, "-0.00123"), (2.0, "2"), (1e-7, "1e-07")],
)
def test_numbers_have_three_significant_digits(value: float, text: str) -> None:
    assert number_text(value) == text


def test_a_cached_corpus_is_not_drawn_again(
    charts: ChartSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "draw_samples", None)
    charts.prepare()


@pytest.mark.parametrize("damage", ["truncate", "flip", "no manifest", "bad manifest"])
def test_a_damaged_corpus_is_drawn_anew(
    damage: str,
    charts: ChartSource,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def copied(
        options: ChartOptions, num_samples: int, num_workers: int
    ) -> Generator[Any, None, None]:
        for i in range(num_samples):
            (turn,), images = charts.texts(i), charts.images(i)
            image = images[0] if images else None
            yield i, ChartSample(user=turn.user, assistant=turn.assistant, image=image)

    shutil.copytree(charts.folder, tmp_path / charts.folder.name)
    corpus = ChartSource(20, cache_dir=str(tmp_path), **LIKE_CHARTS)
    monkeypatch.setattr(source, "draw_samples", copied)
    file, manifest = corpus.folder / "charts.parquet", corpus.folder / "manifest.json"
    whole = file.read_bytes()
    if damage == "truncate":
        file.write_bytes(whole[:-10])
    elif damage == "flip":
        file.write_bytes(whole[:50] + bytes([whole[50] ^ 1]) + whole[51:])
    elif damage == "no manifest":
        manifest.unlink()
    else:
        manifest.write_text("{")
        with pytest.raises(DataError, match="missing or damaged"):
            corpus.fingerprint()
    with caplog.at_level(logging.WARNING):
        corpus.prepare()
    assert "drawing it anew" in caplog.text
    assert file.read_bytes() == whole
    assert corpus.images(3) == charts.images(3)


def test_a_full_disk_leaves_nothing_that_looks_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = ChartSource(12, cache_dir=str(tmp_path), num_workers=2, **SMALL)
    real = os.fdopen

    class FullDisk:
        def __init__(self, file: io.BufferedWriter) -> None:
            self.file, self.room = file, 5000

        def write(self, data: bytes) -> int:
            self.room -= len(data)
            if self.room < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return self.file.write(data)

        def __getattr__(self, name: str) -> object:
            return getattr(self.file, name)

        def __enter__(self) -> FullDisk:
            return self

        def __exit__(self, *error: object) -> None:
            self.file.close()

    monkeypatch.setattr(cache.os, "fdopen", lambda *args: FullDisk(real(*args)))
    with pytest.raises(DataError) as caught:
        corpus.prepare()
    assert "The disk is full" in str(caught.value)
    assert "LIGHTNING_ENTRAIN_CACHE" in str(caught.value)
    assert list(corpus.folder.iterdir()) == []
    assert workers_of(os.getpid()) == []
    monkeypatch.undo()
    monkeypatch.setenv("LIGHTNING_ENTRAIN_CACHE", str(tmp_path))
    corpus.prepare()
    assert len(corpus.images(11)) == 1


def test_a_chart_that_fails_ends_all_workers_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ChartOptions(max_side=160)
    object.__setattr__(options, "min_side", "sixty")
    with pytest.raises(DataError, match=r"A process that draws charts ended at chart \d"):
        list(pool.draw_samples(options, 4, 2))
    assert workers_of(os.getpid()) == []

    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "sitecustomize.py").write_text(
        "from lightning_entrain.data.charts import tables\n"
        "def fail(name): raise RuntimeError('no ink')\n"
        "tables.read_records = fail\n"
    )
    with pytest.raises(DataError, match=r"Chart \d could not be drawn: no ink"):
        list(pool.draw_samples(ChartOptions(max_side=160), 4, 2))
    assert workers_of(os.getpid()) == []


def test_leaving_early_ends_all_workers() -> None:
    drawn = pool.draw_samples(ChartOptions(max_side=160), 500, 2)
    next(drawn)
    assert len(workers_of(os.getpid())) == 2
    drawn.close()
    assert workers_of(os.getpid()) == []


def test_workers_end_when_the_process_that_started_them_is_killed() -> None:
    code = (
        "from lightning_entrain.data.charts.pool import draw_samples\n"
        "from lightning_entrain.data.charts.sample import ChartOptions\n"
        "drawn = draw_samples(ChartOptions(max_side=160), 10**4, 2)\n"
        "next(drawn); print('drawing', flush=True); list(drawn)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"drawing\n"
    workers = workers_of(parent.pid)
    assert len(workers) == 2
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 20
    while any(_runs(pid) for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_without_the_tables_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_entrain.data.charts import tables

    monkeypatch.setattr(tables, "find_spec", lambda name: None)
    tables.read_records.cache_clear()
    with pytest.raises(DataError, match=r'pip install "lightning_entrain\[demo\]"'):
        tables.read_records("cars.json")
    tables.read_records.cache_clear()


@pytest.mark.parametrize(
    "options",
    [
        {"num_samples": 0},
        {"min_side": 10},
        {"min_side": 400, "max_side": 300},
        {"text_only_fraction": 1.5},
        {"num_workers": 0},
    ],
)
def test_options_are_checked(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        ChartSource(**options)


def test_the_manifest_is_plain(charts: ChartSource) -> None:
    manifest = json.loads((charts.folder / "manifest.json").read_text())
    assert manifest["num_samples"] == 20
    assert sorted(os.listdir(charts.folder))[-2:] == ["charts.parquet", "manifest.json"]
