"""Text to token ids, and the special tokens that frame a sample."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

SPECIAL_TOKENS = ("<|image|>", "<|end|>", "<|user|>", "<|assistant|>")
"""Vision placeholder, end of an answer, start of what the user says, start of the answer."""


@runtime_checkable
class TextTokenizer(Protocol):
    """What the data code needs of a tokenizer. It must be picklable.

    Attributes:
        vocab_size: Number of ids, special tokens included.
        image_token_id: Placeholder of one vision token.
        eos_token_id: Ends an answer.
        user_token_id: Starts what the user says.
        assistant_token_id: Starts the answer.
    """

    vocab_size: int
    image_token_id: int
    eos_token_id: int
    user_token_id: int
    assistant_token_id: int

    def encode(self, text: str) -> list[int]:
        """Ids of plain text. Text that spells a special token must not become one."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Text of ids, special tokens left out."""
        ...

    def fingerprint(self) -> str:
        """Text that changes when any text's ids do."""
        ...


class ByteTokenizer:
    """The four special tokens as ids 0 to 3, then one token per UTF-8 byte. Needs no training."""

    vocab_size = 256 + len(SPECIAL_TOKENS)
    image_token_id = 0
    eos_token_id = 1
    user_token_id = 2
    assistant_token_id = 3

    def encode(self, text: str) -> list[int]:
        """UTF-8 bytes of the text, each raised by 4."""
        return [byte + len(SPECIAL_TOKENS) for byte in text.encode("utf-8")]

    def decode(self, ids: list[int]) -> str:
        """Text of the bytes among the ids; broken sequences become the replacement sign."""
        data = bytes(i - len(SPECIAL_TOKENS) for i in ids if i >= len(SPECIAL_TOKENS))
        return data.decode("utf-8", errors="replace")

    def fingerprint(self) -> str:
        """Constant: the mapping never changes."""
        return "bytes-1"
