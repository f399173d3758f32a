"""Random images and texts of very different sizes, in memory: for tests and quick trials."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from lightning_entrain.data.dataset import SizedDataset, measure_sample
from lightning_entrain.data.records import Turn
from lightning_entrain.data.tokenizer import ByteTokenizer, TextTokenizer
from lightning_entrain.errors import ConfigError
from lightning_entrain.workload.image_rule import ImageRule

_WORDS = ("amber", "blue", "cedar", "delta", "ember", "fern", "gold", "heath", "iris", "jade")


class SyntheticSource:
    """Seeded random samples, made when asked for and never stored.

    Args:
        num_samples: Number of samples.
        seed: Same seed, same samples.
        text_only_fraction: Share of samples without an image, spread evenly.
        min_side: Least side of an image, in pixels.
        max_side: Largest side of an image, in pixels.
        max_words: Most words in an answer.
    """

    def __init__(
        self,
        num_samples: int = 32,
        *,
        seed: int = 0,
        text_only_fraction: float = 0.2,
        min_side: int = 20,
        max_side: int = 300,
        max_words: int = 24,
    ) -> None:
        if num_samples < 1:
            raise ConfigError(f"num_samples is {num_samples}", limit="at least 1")
        if not 0 <= text_only_fraction <= 1:
            raise ConfigError(f"text_only_fraction is {text_only_fraction}", limit="0 to 1")
        if not 1 <= min_side <= max_side:
            raise ConfigError(
                f"min_side is {min_side}, max_side {max_side}", limit="1 <= min_side <= max_side"
            )
        self.name = f"synthetic({num_samples}, seed={seed})"
        self._num_samples = num_samples
        self._seed = seed
        self._text_only_fraction = text_only_fraction
        self._min_side, self._max_side = min_side, max_side
        self._max_words = max_words

    def prepare(self) -> None:
        """Nothing to prepare."""

    def fingerprint(self) -> str:
        """All arguments."""
        limits = (self._text_only_fraction, self._min_side, self._max_side, self._max_words)
        return f"{self.name},{limits}"

    def __len__(self) -> int:
        return self._num_samples

    def texts(self, index: int) -> tuple[Turn, ...]:
        """One turn of random words."""
        random = np.random.default_rng((self._seed, index, 0))
        words = [
            _WORDS[i]
            for i in random.integers(len(_WORDS), size=random.integers(1, self._max_words + 1))
        ]
        return (Turn(f"Say {len(words)} words.", " ".join(words)),)

    def images(self, index: int) -> tuple[bytes, ...]:
        """One image of random size and colours, or none."""
        fraction = self._text_only_fraction
        if int((index + 1) * fraction) > int(index * fraction):
            return ()
        random = np.random.default_rng((self._seed, index, 1))
        low, high = np.log(self._min_side), np.log(self._max_side)
        height, width = (round(float(x)) for x in np.exp(random.uniform(low, high, size=2)))
        coarse = random.integers(0, 256, size=(max(1, height // 8), max(1, width // 8), 3))
        picture = Image.fromarray(coarse.astype(np.uint8)).resize((width, height))
        file = io.BytesIO()
        picture.save(file, "PNG", compress_level=1)
        return (file.getvalue(),)


def synthetic_dataset(
    num_samples: int = 32,
    *,
    seed: int = 0,
    text_only_fraction: float = 0.2,
    min_side: int = 20,
    max_side: int = 300,
    tokenizer: TextTokenizer | None = None,
    image_rule: ImageRule | None = None,
) -> SizedDataset:
    """A measured :class:`SyntheticSource`; arguments as there.

    Args:
        num_samples: Number of samples.
        seed: Same seed, same samples.
        text_only_fraction: Share of samples without an image.
        min_side: Least side of an image, in pixels.
        max_side: Largest side of an image, in pixels.
        tokenizer: Default: one token per byte.
        image_rule: Default: the rule of Qwen2.5-VL.
    """
    source = SyntheticSource(
        num_samples,
        seed=seed,
        text_only_fraction=text_only_fraction,
        min_side=min_side,
        max_side=max_side,
    )
    tokenizer = tokenizer or ByteTokenizer()
    rule = image_rule or ImageRule()
    sizes = [measure_sample(source, i, tokenizer, rule) for i in range(num_samples)]
    return SizedDataset(source, tokenizer, rule, sizes)
