"""A small byte-level BPE, trained once on a corpus and cached beside it."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import tokenizers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from lightning_entrain.data.cache import write_atomically
from lightning_entrain.data.tokenizer import SPECIAL_TOKENS
from lightning_entrain.errors import ConfigError, DataError

_log = logging.getLogger(__name__)

NUM_BYTES = 256
# Tags of tables are words of their own; digits stay apart, so that numbers are always spelt alike.
_WORDS = r"</?[a-z]+>| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}<]+|<|\s+"
MIN_VOCAB_SIZE = len(SPECIAL_TOKENS) + NUM_BYTES


class BpeTokenizer:
    """A trained byte-level BPE; the special tokens are ids 0 to 3.

    Args:
        definition: The tokenizer as the JSON text of the tokenizers library.
    """

    image_token_id = 0
    eos_token_id = 1
    user_token_id = 2
    assistant_token_id = 3

    def __init__(self, definition: str) -> None:
        self._definition = definition
        self._tokenizer = _load(definition)
        self.vocab_size: int = self._tokenizer.get_vocab_size()

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> BpeTokenizer:
        """Train on a corpus. The same texts give the same tokenizer.

        Args:
            texts: All texts of the corpus.
            vocab_size: Most ids, special tokens included; a small corpus may need fewer.

        Raises:
            ConfigError: If ``vocab_size`` has no room for the bytes and the special tokens.
        """
        if vocab_size < MIN_VOCAB_SIZE:
            raise ConfigError(
                f"vocab_size is {vocab_size}",
                limit=f"at least {MIN_VOCAB_SIZE}, bytes and special tokens",
                remedy="set vocab_size=1024",
            )
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        with _single_threaded():
            tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer.to_str())

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; text that spells a special token stays text."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: list[int]) -> str:
        """Text of ids, special tokens left out."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def fingerprint(self) -> str:
        """Digest of the definition."""
        return hashlib.sha256(self._definition.encode()).hexdigest()

    def save(self, path: Path) -> None:
        """Write the definition, whole or not at all.

        Raises:
            DataError: If the file cannot be written.
        """
        write_atomically(path, self._write)

    def _write(self, file: BinaryIO) -> None:
        file.write(self._definition.encode())

    @classmethod
    def load(cls, path: Path) -> BpeTokenizer:
        """Read what :meth:`save` wrote.

        Raises:
            DataError: If the file is missing or damaged.
        """
        try:
            return cls(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(
                f"The tokenizer {path} is missing or damaged ({error})",
                limit="it is trained before it is read",
                remedy="call prepare_data() on one process first, or delete the file",
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        return {"_definition": self._definition}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["_definition"])  # type: ignore[misc]


def trained_tokenizer(path: Path, texts: Iterable[str], vocab_size: int) -> BpeTokenizer:
    """Load a cached tokenizer, or train it and cache it.

    Args:
        path: Where the cache lies; its name must change with the corpus and ``vocab_size``.
        texts: All texts of the corpus, read only if the cache is missing or damaged.
        vocab_size: Most ids.

    Raises:
        DataError: If the cache cannot be written.
    """
    if path.exists():
        try:
            return BpeTokenizer.load(path)
        except DataError as error:
            _log.warning("%s Training it anew.", error.value)
    tokenizer = BpeTokenizer.train(texts, vocab_size)
    tokenizer.save(path)
    return tokenizer


def trainer_version() -> str:
    """Version of what trains: another one may merge differently."""
    return str(tokenizers.__version__)


def _load(definition: str) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(definition)
    except Exception as error:  # the library raises bare exceptions
        raise ValueError(f"no tokenizer definition: {error}") from error
    found = [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS]
    if found != list(range(len(SPECIAL_TOKENS))):
        raise ValueError(f"special tokens have the ids {found}, not 0 to 3")
    # Not part of the definition: without it a text could smuggle in a vision placeholder.
    tokenizer.encode_special_tokens = True
    return tokenizer


@contextmanager
def _single_threaded() -> Iterator[None]:
    """Train in one thread: the library warns when a process forks after it used several."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
