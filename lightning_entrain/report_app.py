"""The app `entrain-report`: the report of a run again, or of several runs side by side."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from lightning_entrain.errors import DataError, EntrainError
from lightning_entrain.observe.compare_page import compare_page
from lightning_entrain.observe.page import GENERATOR
from lightning_entrain.observe.run_files import read_run
from lightning_entrain.observe.run_page import run_page
from lightning_entrain.observe.run_record import RECORD_FILE, REPORT_FILE

COMPARISON_FILE = "comparison.html"


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `entrain-report`."""
    parser = argparse.ArgumentParser(
        prog="entrain-report",
        description="Writes the report of a run from its logged files, or compares several runs.",
        epilog="Examples: entrain-report outputs/2026-01-01/12-00-00;  "
        "entrain-report multirun/2026-01-01/12-00-00",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="folder of a run or of a sweep, or a run's run_record.json, metrics.csv, .wandb or "
        "TensorBoard file",
    )
    parser.add_argument(
        "--output",
        type=Path,
        help=f"page to write; default {REPORT_FILE} in the run's folder, or {COMPARISON_FILE} here",
    )
    options = parser.parse_args(arguments)
    try:
        print(write_report(options.runs, options.output))
    except EntrainError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(1)


def write_report(runs: Sequence[Path], output: Path | None = None) -> Path:
    """Write the page of one run, or of several.

    Args:
        runs: Folders or files.
        output: Where to; None chooses.

    Returns:
        The page's path.

    Raises:
        DataError: If a run cannot be read, or the page cannot be written, or what is there already
            is no such page.
    """
    runs = [run for path in runs for run in jobs_of(path)]
    records = [read_run(path) for path in runs]
    if len(records) == 1:
        folder = runs[0] if runs[0].is_dir() else runs[0].parent
        output, text = output or folder / REPORT_FILE, run_page(records[0])
    else:
        output = output or Path(COMPARISON_FILE)
        text = compare_page(records, [_report_address(run, output) for run in runs])
    _check_target(output)
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DataError(
            f"{output} cannot be written ({error.strerror})", remedy="pass --output PATH"
        ) from error
    return output


def _report_address(run: Path, output: Path) -> str:
    """The run's own report as seen from the page; empty without one."""
    report = (run if run.is_dir() else run.parent) / REPORT_FILE
    if not report.is_file():
        return ""
    return quote(Path(os.path.relpath(report.absolute(), output.absolute().parent)).as_posix())


def _check_target(output: Path) -> None:
    """Refuse to overwrite what is no page of this package."""
    if not output.is_file():
        return
    with open(output, encoding="utf-8", errors="replace") as file:
        if GENERATOR in file.read(2000):
            return
    raise DataError(
        f"{output} exists and is no report that lightning_entrain wrote",
        remedy="pass --output PATH with another name, or move that file away",
    )


def jobs_of(path: Path) -> list[Path]:
    """The runs of a sweep's folder, by number; any other path alone."""
    if not path.is_dir() or (path / RECORD_FILE).exists():
        return [path]
    found = [record.parent for record in path.glob(f"*/{RECORD_FILE}")]
    return sorted(found, key=lambda run: (len(run.name), run.name)) or [path]


if __name__ == "__main__":
    main()
