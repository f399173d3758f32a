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
    """One token per UTF-8 byte, and the special tokens. Needs no training.

    The ids of bytes are the bytes; the four special tokens follow as 256 to 259.
    """

    vocab_size = 256 + len(SPECIAL_TOKENS)
    image_token_id = 256
    eos_token_id = 257
    user_token_id = 258
    assistant_token_id = 259

    def encode(self, text: str) -> list[int]:
        """UTF-8 bytes of the text."""
        return list(text.encode("utf-8"))

    def decode(self, ids: list[int]) -> str:
        """Text of the bytes among the ids; broken sequences become the replacement sign."""
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def fingerprint(self) -> str:
        """Constant: the mapping never changes."""
        return "bytes-1"
