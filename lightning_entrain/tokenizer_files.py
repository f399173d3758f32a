"""A run's tokenizer as the files that transformers reads, for use with the exported LLM."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from lightning_entrain.data.bpe import BpeTokenizer
from lightning_entrain.data.tokenizer import SPECIAL_TOKENS
from lightning_entrain.errors import CheckpointError

TOKENIZER_FOLDER = "tokenizer"
"""Folder in a run's folder."""

_FILE = "tokenizer.json"


def save_tokenizer(tokenizer: Any, folder: Path) -> bool:
    """Write a tokenizer so that `AutoTokenizer.from_pretrained(folder)` reads it.

    Args:
        tokenizer: One with `save_pretrained`, or a `BpeTokenizer`. transformers spells special
            tokens in texts as such; `BpeTokenizer.encode` does not.
        folder: Where to.

    Returns:
        Whether it is of a kind that can be written: bytes alone, for one, are not.
    """
    if hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(str(folder))
        return True
    if not isinstance(tokenizer, BpeTokenizer):
        return False
    from transformers import PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder / _FILE)
    image, end, user, assistant = SPECIAL_TOKENS
    fast = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / _FILE),
        eos_token=end,
        pad_token=end,
        extra_special_tokens=[image, user, assistant],
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(str(folder))
    return True


def tokenizer_of_run(checkpoint: Path) -> Path | None:
    """The tokenizer in the folder of the run that a checkpoint lies in."""
    for parent in checkpoint.absolute().parents[:3]:
        if (parent / TOKENIZER_FOLDER).is_dir():
            return parent / TOKENIZER_FOLDER
    return None


def add_tokenizer(source: Path, llm: Path) -> None:
    """Copy a tokenizer's files beside an LLM.

    Args:
        source: Folder as `save_pretrained` writes it, or a `tokenizer.json`.
        llm: Folder of the LLM.

    Raises:
        CheckpointError: If there is none.
    """
    files = [path for path in source.iterdir() if path.is_file()] if source.is_dir() else [source]
    if not source.exists() or not files:
        raise CheckpointError(
            f"There is no tokenizer at {source}",
            limit="a folder that save_pretrained wrote, or a tokenizer.json",
            remedy="correct --tokenizer, or leave it out",
        )
    for path in files:
        shutil.copy(path, llm / (path.name if source.is_dir() else _FILE))
