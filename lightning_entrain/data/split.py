"""Which samples are used, and for what."""

from __future__ import annotations

import random

from lightning_entrain.data.index import BadSample, SizeTable
from lightning_entrain.errors import ConfigError

SPLITS = ("train", "val", "test")


def split_samples(
    num_samples: int, val_fraction: float, test_fraction: float
) -> dict[str, list[int]]:
    """Indices of the samples of each split, ascending; the same for the same numbers."""
    order = list(range(num_samples))
    random.Random("split").shuffle(order)
    num_val = round(num_samples * val_fraction)
    num_test = round(num_samples * test_fraction)
    parts = order[num_val + num_test :], order[:num_val], order[num_val : num_val + num_test]
    return {name: sorted(part) for name, part in zip(SPLITS, parts, strict=True)}


def too_long_samples(table: SizeTable, source_name: str, max_tokens: int) -> list[BadSample]:
    """Samples whose row in the LLM is longer than ``max_tokens``."""
    lengths = table.num_tokens()
    return [
        BadSample(
            row=(row := int(table.rows[i])),
            value=f"Sample {row} of {source_name} has {lengths[i]} tokens",
            limit=f"max_tokens is {max_tokens}",
            remedy="raise max_tokens, lower max_pixels, or set on_bad_sample=skip",
        )
        for i in (lengths > max_tokens).nonzero()[0]
    ]


def check_options(
    seed: int,
    val_fraction: float,
    test_fraction: float,
    max_tokens: int,
    on_bad_sample: str,
    num_workers: int,
) -> None:
    """Check options of the data module.

    Raises:
        ConfigError: For the first that cannot be used.
    """
    if not 0 <= seed < 2**32:
        raise ConfigError(f"seed is {seed}", limit="0 to 2**32 - 1", remedy="choose another seed")
    for name, fraction in (("val_fraction", val_fraction), ("test_fraction", test_fraction)):
        if not 0 <= fraction < 1:
            raise ConfigError(f"{name} is {fraction}", limit="0 <= fraction < 1")
    if val_fraction + test_fraction >= 1:
        raise ConfigError(
            f"val_fraction is {val_fraction} and test_fraction is {test_fraction}",
            limit="their sum is below 1",
            remedy="leave something to train on",
        )
    if max_tokens < 1:
        raise ConfigError(f"max_tokens is {max_tokens}", limit="at least 1")
    if on_bad_sample not in ("raise", "skip"):
        raise ConfigError(
            f"on_bad_sample is {on_bad_sample!r}",
            limit="raise or skip",
            remedy="set on_bad_sample=skip to leave out samples that cannot be used",
        )
    if num_workers < 0:
        raise ConfigError(f"num_workers is {num_workers}", limit="at least 0")
