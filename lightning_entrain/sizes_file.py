"""A user's own table of sample sizes: CSV, Parquet or JSON lines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_entrain.errors import ConfigError, DataError
from lightning_entrain.workload.datasets import RawSizes
from lightning_entrain.workload.shapes import ViewRule
from lightning_entrain.workload.tables import WINDOW, IntArray, SizeTable
from lightning_entrain.workload.vision_rules import table_from_raw

TOKEN_COLUMNS = ("vision_tokens", "text_tokens")
IMAGE_COLUMNS = ("image_w", "image_h", "text_tokens")
MAX_VALUE = 10**8


def read_sizes(path: str | Path, rule: ViewRule) -> SizeTable:
    """Read a table with one row per sample.

    Columns are either ``vision_tokens`` and ``text_tokens`` (tokens in the LLM) or ``image_w``,
    ``image_h`` (pixels; 0 for no image) and ``text_tokens``. Other columns are ignored. With both,
    image sizes win, because they give the exact patch grid.

    Args:
        path: File ending in .csv, .parquet, .jsonl or .ndjson.
        rule: How the model turns images into patches.

    Raises:
        DataError: If the file is missing or cannot be read.
        ConfigError: If a column is missing, or a value is empty, negative, not a whole number or
            absurdly large; it names the row.
    """
    columns = _read_columns(Path(path))
    names = IMAGE_COLUMNS if set(IMAGE_COLUMNS) <= set(columns) else TOKEN_COLUMNS
    missing = [name for name in names if name not in columns]
    if missing:
        raise ConfigError(
            f"{path} has no column {missing[0]!r} (it has {', '.join(columns) or 'none'})",
            limit=f"{' and '.join(TOKEN_COLUMNS)}, or {', '.join(IMAGE_COLUMNS)}",
            remedy="rename or add the columns",
        )
    values = {name: _whole_numbers(str(path), name, columns[name]) for name in names}
    if len(values["text_tokens"]) == 0:
        raise ConfigError(f"{path} has no rows", limit="at least one sample")
    if names is IMAGE_COLUMNS:
        return table_from_raw(
            RawSizes(
                image_w=values["image_w"],
                image_h=values["image_h"],
                num_text_tokens=values["text_tokens"],
            ),
            rule,
        )
    return table_from_tokens(values["vision_tokens"], values["text_tokens"], rule)


def table_from_tokens(vision_tokens: IntArray, text_tokens: IntArray, rule: ViewRule) -> SizeTable:
    """Sizes from token counts alone: one image per sample with vision tokens.

    Attention windows are taken to be full, and views of a fixed size to be as many as the tokens
    need.
    """
    if rule.kind == "qwen":
        patches = vision_tokens * rule.merge_size**2
        images = (vision_tokens > 0).astype(np.int64)
        full = patches**2
    else:
        side = rule.image_size // rule.patch_size
        per_view = rule.tokens_per_view or side**2 // rule.merge_size**2
        images = -(-vision_tokens // per_view)
        patches = images * side**2
        full = images * side**4
    return SizeTable(
        num_patches=patches,
        num_vision_tokens=vision_tokens,
        num_text_tokens=text_tokens,
        num_images=images,
        full_pairs=full,
        window_pairs=np.minimum(full, patches * WINDOW**2),
    )


def _read_columns(path: Path) -> Mapping[str, Any]:
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.json
    import pyarrow.parquet

    readers = {
        ".csv": pyarrow.csv.read_csv,
        ".parquet": pyarrow.parquet.read_table,
        ".jsonl": pyarrow.json.read_json,
        ".ndjson": pyarrow.json.read_json,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(
            f"data.sizes is {str(path)!r}",
            limit=f"a file ending in {', '.join(readers)}",
        )
    if not path.is_file():
        raise DataError(f"data.sizes is {str(path)!r}, which is not a file")
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty", limit="a table with a header and at least one row")
    try:
        table = reader(str(path))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}", limit="a table") from error
    return {name: table.column(name).to_pylist() for name in table.column_names}


def _whole_numbers(path: str, name: str, column: list[Any]) -> IntArray:
    numbers: NDArray[np.float64] = np.full(len(column), np.nan)
    for index, value in enumerate(column):
        if isinstance(value, int | float) and not isinstance(value, bool):
            numbers[index] = value
    fine = np.isfinite(numbers) & (numbers >= 0) & (numbers <= MAX_VALUE)
    fine &= np.where(fine, numbers, 0.5) % 1 == 0
    broken = np.flatnonzero(~fine)
    if broken.size:
        row = int(broken[0])
        raise ConfigError(
            f"{path}, row {row + 1}: {name} is {column[row]!r}"
            + (f" ({broken.size} such rows)" if broken.size > 1 else ""),
            limit=f"a whole number from 0 to {MAX_VALUE:,}",
            remedy="correct or remove the rows",
        )
    return numbers.astype(np.int64)
