"""What a data source hands out, before any size rule or tokenizer is applied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Turn:
    """One exchange of a conversation.

    Attributes:
        user: What the model reads.
        assistant: What the model learns to write.
    """

    user: str
    assistant: str


@runtime_checkable
class Source(Protocol):
    """Samples of encoded images and text, read by index.

    Images and texts are read separately, so that a rank that needs only one reads only that.
    A source must be picklable: loader workers get a copy.
    """

    name: str

    def prepare(self) -> None:
        """Do what one process must do first: draw, convert, cache. Calling it again is cheap."""
        ...

    def fingerprint(self) -> str:
        """Text that changes when the data does. Valid after :meth:`prepare`."""
        ...

    def __len__(self) -> int:
        """Number of samples. Valid after :meth:`prepare`."""
        ...

    def texts(self, index: int) -> tuple[Turn, ...]:
        """The sample's conversation."""
        ...

    def images(self, index: int) -> tuple[bytes, ...]:
        """The sample's image files, still encoded; empty for a text-only sample."""
        ...
