from __future__ import annotations

import logging
import pickle
from pathlib import Path

import pytest

from lightning_entrain.data.bpe import BpeTokenizer, trained_tokenizer
from lightning_entrain.data.tokenizer import SPECIAL_TOKENS, ByteTokenizer, TextTokenizer
from lightning_entrain.errors import ConfigError, DataError

TEXTS = ["<otsl><ched>Year<ched>Wheat<nl><rhed>1565<fcel>41<nl></otsl>", "Convert this chart."] * 3


@pytest.fixture(scope="module")
def bpe() -> BpeTokenizer:
    return BpeTokenizer.train(TEXTS, 300)


@pytest.mark.parametrize(
    "text", [*TEXTS, "a  b\n\tc", "Übergrößenträger 你好 🙂", "", "x<y>z 12.5"]
)
@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_any_text_is_read_back(kind: str, text: str, bpe: BpeTokenizer) -> None:
    tokenizer: TextTokenizer = bpe if kind == "bpe" else ByteTokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode([1, *ids, 0]) == text
    assert all(4 <= i < tokenizer.vocab_size for i in ids)


@pytest.mark.parametrize("special", SPECIAL_TOKENS)
def test_plain_text_never_becomes_a_special_token(special: str, bpe: BpeTokenizer) -> None:
    for tokenizer in (bpe, pickle.loads(pickle.dumps(bpe)), ByteTokenizer()):
        assert min(tokenizer.encode(f"say {special} now")) >= 4


def test_training_is_repeatable_and_shortens_the_corpus(bpe: BpeTokenizer) -> None:
    assert BpeTokenizer.train(TEXTS, 300).fingerprint() == bpe.fingerprint()
    assert BpeTokenizer.train(TEXTS[:1], 300).fingerprint() != bpe.fingerprint()
    assert bpe.vocab_size <= 300
    assert len(bpe.encode(TEXTS[0])) < len(TEXTS[0]) / 2
    digits = [bpe.decode([i]) for i in bpe.encode("<fcel>1565<nl>")]
    assert digits[-5:-1] == ["1", "5", "6", "5"]


def test_a_vocabulary_without_room_for_the_bytes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"vocab_size is 259.* at least 260"):
        BpeTokenizer.train(TEXTS, 259)


def test_it_is_trained_once_and_cached(tmp_path: Path, bpe: BpeTokenizer) -> None:
    path = tmp_path / "deep" / "tokenizer.json"
    first = trained_tokenizer(path, TEXTS, 300)
    again = trained_tokenizer(path, iter(["another corpus"]), 300)
    assert first.fingerprint() == again.fingerprint() == bpe.fingerprint()
    assert again.encode(TEXTS[0]) == bpe.encode(TEXTS[0])
    assert [file.name for file in path.parent.iterdir()] == ["tokenizer.json"]


@pytest.mark.parametrize("damage", ["", "{", '{"model": 1}'])
def test_a_damaged_cache_is_replaced(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, bpe: BpeTokenizer
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(damage)
    with pytest.raises(DataError, match=r"tokenizer\.json is missing or damaged"):
        BpeTokenizer.load(path)
    with caplog.at_level(logging.WARNING):
        found = trained_tokenizer(path, TEXTS, 300)
    assert "Training it anew" in caplog.text
    assert found.fingerprint() == BpeTokenizer.load(path).fingerprint() == bpe.fingerprint()


def test_a_tokenizer_with_other_special_tokens_is_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    path = tmp_path / "other.json"
    Tokenizer(models.BPE()).save(str(path))
    with pytest.raises(DataError, match="special tokens have the ids"):
        BpeTokenizer.load(path)
