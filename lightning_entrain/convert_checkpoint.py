"""Turns a sharded checkpoint into a file, and a file into a sharded checkpoint.

`python -m lightning_entrain.convert_checkpoint IN OUT`
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lightning_entrain.errors import CheckpointError, EntrainError


def convert_checkpoint(source: str | Path, target: str | Path) -> None:
    """Write a checkpoint in the other form.

    A folder becomes a file that any single-device Lightning run reads; a file, also one that
    Lightning's consolidation tool made of a folder, becomes a folder of one shard. The whole
    checkpoint is held in memory meanwhile.

    Args:
        source: Checkpoint file or folder.
        target: Where to write; must not exist.

    Raises:
        CheckpointError: If the source is no whole checkpoint, or the target exists.
    """
    from lightning_entrain.checkpoint.files import EntrainCheckpointIO, existing
    from lightning_entrain.checkpoint.sharded import split, write_sharded

    source, target = Path(source), Path(target)
    if target.exists():
        raise CheckpointError(f"{target} exists", limit="a new name", remedy="choose another name")
    source = existing(source)
    if not source.exists():
        raise CheckpointError(f"There is no {source}", limit="an existing checkpoint")
    files = EntrainCheckpointIO()
    checkpoint = files.load_checkpoint(source)
    if "state_dict" not in checkpoint:
        raise CheckpointError(
            f"{source} has no state_dict", limit="a checkpoint of a Lightning Trainer"
        )
    if source.is_dir():
        checkpoint["state_dict"] = dict(checkpoint["state_dict"])
        files.save_checkpoint(checkpoint, target)
    else:
        write_sharded(target, *split(checkpoint), group=None)


def main() -> None:
    """Entry point of `python -m lightning_entrain.convert_checkpoint`."""
    parser = argparse.ArgumentParser(
        prog="python -m lightning_entrain.convert_checkpoint",
        description="Turn a sharded checkpoint (a folder) into a file, or a file into a folder.",
    )
    parser.add_argument("source", metavar="IN", help="checkpoint file or folder")
    parser.add_argument("target", metavar="OUT", help="where to write; must not exist")
    arguments = parser.parse_args()
    try:
        convert_checkpoint(arguments.source, arguments.target)
    except (EntrainError, OSError) as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(1)
    print(f"Wrote {arguments.target}")


if __name__ == "__main__":
    main()
