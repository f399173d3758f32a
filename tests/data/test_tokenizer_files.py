"""The run's tokenizer as transformers reads it, beside the exported LLM."""

import pytest
from transformers import AutoTokenizer

from lightning_entrain.data.bpe import BpeTokenizer
from lightning_entrain.data.tokenizer import ByteTokenizer
from lightning_entrain.errors import CheckpointError
from lightning_entrain.tokenizer_files import add_tokenizer, save_tokenizer, tokenizer_of_run

TEXT = "<table><tr><td>a 12.5 %</td></tr></table>  größer , isn't it ?"


def test_transformers_reads_what_the_run_wrote(tmp_path):
    own = BpeTokenizer.train([TEXT, "the table of a run"], 300)
    checkpoint = tmp_path / "run" / "checkpoints" / "last.ckpt"
    assert tokenizer_of_run(checkpoint) is None
    assert save_tokenizer(own, tmp_path / "run" / "tokenizer")
    found = tokenizer_of_run(checkpoint)
    (tmp_path / "llm").mkdir()
    add_tokenizer(found, tmp_path / "llm")
    read = AutoTokenizer.from_pretrained(tmp_path / "llm")
    ids = own.encode(TEXT)
    assert read(TEXT, add_special_tokens=False).input_ids == ids
    assert read.decode([own.assistant_token_id, *ids, own.eos_token_id]).endswith("it ?<|end|>")
    assert read.decode([0, 2, 3, *ids, 1], skip_special_tokens=True) == own.decode(ids) == TEXT
    assert read.eos_token_id == own.eos_token_id
    assert read.convert_tokens_to_ids("<|user|>") == own.user_token_id


def test_other_tokenizers(tmp_path):
    class OfTransformers:
        def save_pretrained(self, folder):
            (tmp_path / "wrote").write_text(folder)

    assert save_tokenizer(OfTransformers(), tmp_path / "x")
    assert (tmp_path / "wrote").read_text() == str(tmp_path / "x")
    assert not save_tokenizer(ByteTokenizer(), tmp_path / "y")
    with pytest.raises(CheckpointError, match=r"no tokenizer at .*Remedy: correct --tokenizer"):
        add_tokenizer(tmp_path / "nowhere", tmp_path)
    (tmp_path / "mine.json").write_text("{}")
    (tmp_path / "llm").mkdir()
    add_tokenizer(tmp_path / "mine.json", tmp_path / "llm")
    assert (tmp_path / "llm" / "tokenizer.json").read_text() == "{}"
