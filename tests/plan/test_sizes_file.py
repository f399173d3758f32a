"""Users' own tables of sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lightning_entrain.errors import ConfigError, DataError
from lightning_entrain.sizes_file import read_sizes
from lightning_entrain.workload.shapes import ViewRule

QWEN = ViewRule()
ROWS = [
    {"vision_tokens": 256, "text_tokens": 40, "note": "a"},
    {"vision_tokens": 0, "text_tokens": 9, "note": "b"},
]


def write(path: Path, rows: list[dict]) -> Path:
    if path.suffix == ".csv":
        lines = [",".join(rows[0])] + [",".join(str(v) for v in row.values()) for row in rows]
        path.write_text("\n".join(lines) + "\n")
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_all_formats_agree(tmp_path: Path, suffix: str) -> None:
    table = read_sizes(write(tmp_path / f"sizes.{suffix}", ROWS), QWEN)
    assert table.num_patches.tolist() == [1024, 0]
    assert table.num_vision_tokens.tolist() == [256, 0]
    assert table.num_text_tokens.tolist() == [40, 9]
    assert table.num_images.tolist() == [1, 0]
    assert table.full_pairs.tolist() == [1024**2, 0]
    assert table.window_pairs.tolist() == [1024 * 64, 0]


def test_image_sizes_give_the_exact_grid(tmp_path: Path) -> None:
    rows = [{"image_w": 640, "image_h": 480, "text_tokens": 5}]
    rows.append({"image_w": 0, "image_h": 0, "text_tokens": 7})
    table = read_sizes(write(tmp_path / "a.parquet", rows), QWEN)
    assert table.num_patches.tolist() == [34 * 46, 0]


def test_tokens_of_fixed_views(tmp_path: Path) -> None:
    rule = ViewRule(kind="fixed", image_size=336, merge_size=1)
    rows = [{"vision_tokens": 1152, "text_tokens": 5}]
    table = read_sizes(write(tmp_path / "a.csv", rows), rule)
    assert table.num_images.tolist() == [2]
    assert table.full_pairs.tolist() == [2 * 576**2]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"vision_tokens": 3, "words": 4}],
            "no column 'text_tokens' .it has vision_tokens, words",
        ),
        ([{"image_w": 3, "image_h": 4}], "no column 'vision_tokens'"),
        ([{"vision_tokens": 3, "text_tokens": -4}], "row 1: text_tokens is -4"),
        ([ROWS[1], {"vision_tokens": 0.5, "text_tokens": 4, "note": ""}], "row 2: vision_tokens"),
        ([{"vision_tokens": "many", "text_tokens": 4}], "vision_tokens is 'many'"),
        ([{"vision_tokens": 10**9, "text_tokens": 4}], "is 1000000000"),
    ],
)
@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_bad_values(tmp_path: Path, suffix: str, rows: list[dict], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_sizes(write(tmp_path / f"bad.{suffix}", rows), QWEN)


def test_empty_cells_and_nan(tmp_path: Path) -> None:
    (tmp_path / "gap.csv").write_text("vision_tokens,text_tokens\n3,\n,4\n")
    with pytest.raises(ConfigError, match="row 2: vision_tokens is None"):
        read_sizes(tmp_path / "gap.csv", QWEN)
    rows = [{"vision_tokens": float("nan"), "text_tokens": 4.0}]
    with pytest.raises(ConfigError, match="row 1: vision_tokens is nan"):
        read_sizes(write(tmp_path / "nan.parquet", rows), QWEN)


def test_files_that_are_no_table(tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "header.csv").write_text("vision_tokens,text_tokens\n")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no")
    (tmp_path / "x.xlsx").write_text("")
    for name, error, message in (
        ("empty.csv", DataError, "is empty"),
        ("header.csv", ConfigError, "has no rows"),
        ("broken.parquet", DataError, "cannot be read"),
        ("x.xlsx", ConfigError, "a file ending in"),
        ("absent.csv", DataError, "not a file"),
    ):
        with pytest.raises(error, match=message):
            read_sizes(tmp_path / name, QWEN)
