"""A source, a tokenizer and a size rule together: samples whose size is known before loading."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_entrain.data.batch import IGNORE_INDEX
from lightning_entrain.data.images import image_patches, image_size
from lightning_entrain.data.records import Source, Turn
from lightning_entrain.data.tokenizer import TextTokenizer
from lightning_entrain.errors import SampleError
from lightning_entrain.workload.image_rule import ImageRule
from lightning_entrain.workload.sizes import SampleSize


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One sample's row in an LLM microbatch.

    Attributes:
        input_ids: ``[tokens]``, int64: image placeholders, then the conversation.
        labels: ``[tokens]``, int64: the next token where it is the assistant's, else
            ``IGNORE_INDEX``.
    """

    input_ids: Tensor
    labels: Tensor


def encode_turns(turns: Sequence[Turn], tokenizer: TextTokenizer) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation, and which of them the model has to predict.

    Each turn is ``<user> text <assistant> answer <end>``; answer and end are predicted.

    Raises:
        SampleError: If there is no turn, or one whose text or answer is empty.
    """
    if not turns:
        raise SampleError(
            "The sample has no text",
            limit="at least one pair of user and assistant texts",
            remedy="remove the sample, or set on_bad_sample=skip",
        )
    ids: list[int] = []
    predicted: list[bool] = []
    for number, turn in enumerate(turns):
        for role, text in (("user", turn.user), ("assistant", turn.assistant)):
            if not text.strip():
                raise SampleError(
                    f"The {role} text of turn {number} is empty ({text!r})",
                    limit="at least one character that is not white space",
                    remedy="remove the sample, or set on_bad_sample=skip",
                )
        prompt = [
            tokenizer.user_token_id,
            *tokenizer.encode(turn.user),
            tokenizer.assistant_token_id,
        ]
        answer = [*tokenizer.encode(turn.assistant), tokenizer.eos_token_id]
        ids += prompt + answer
        predicted += [False] * len(prompt) + [True] * len(answer)
    if tokenizer.image_token_id in ids:
        raise SampleError(
            "The text was encoded to the id that stands for a vision token",
            limit="placeholders come from images alone",
            remedy="use a tokenizer that does not parse special tokens in plain text",
        )
    return ids, predicted


class SizedDataset:
    """Samples of a source, with their sizes, loaded part by part.

    Args:
        source: Where images and texts come from.
        tokenizer: Turns text into ids.
        image_rule: Turns images into patches.
        sizes: Size of every sample, as measured by :func:`measure_sample`.
        rows: Index in the source of every sample; None takes them all, in order.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: TextTokenizer,
        image_rule: ImageRule,
        sizes: Sequence[SampleSize],
        rows: Sequence[int] | None = None,
    ) -> None:
        self.source = source
        self.tokenizer = tokenizer
        self.image_rule = image_rule
        self.sizes = sizes
        self.rows = range(len(sizes)) if rows is None else rows

    def __len__(self) -> int:
        return len(self.sizes)

    def load_pixels(self, index: int) -> Tensor:
        """Patches of the sample's images, ``[patches, patch_dim]``, float32.

        Raises:
            SampleError: If an image cannot be decoded, or no longer has the size it had.
        """
        size = self.sizes[index]
        try:
            images = self.source.images(self.rows[index])
            parts = [image_patches(data, self.image_rule) for data in images]
        except SampleError as error:
            raise self._at(index, error) from error
        num_patches = sum(len(part) for part in parts)
        if num_patches != size.num_patches:
            raise self._changed(index, f"{num_patches} patches", f"{size.num_patches}")
        return torch.cat(parts) if parts else torch.empty(0, self.image_rule.patch_dim)

    def load_tokens(self, index: int) -> TokenRow:
        """Token ids and labels of the sample; its images are not opened.

        Raises:
            SampleError: If the text is empty, or no longer has the length it had.
        """
        size = self.sizes[index]
        try:
            ids, predicted = encode_turns(self.source.texts(self.rows[index]), self.tokenizer)
        except SampleError as error:
            raise self._at(index, error) from error
        if len(ids) != size.num_text_tokens:
            raise self._changed(index, f"{len(ids)} text tokens", f"{size.num_text_tokens}")
        ids = [self.tokenizer.image_token_id] * size.num_vision_tokens + ids
        predicted = [False] * size.num_vision_tokens + predicted
        targets = [
            token if wanted else IGNORE_INDEX for token, wanted in zip(ids, predicted, strict=True)
        ]
        return TokenRow(
            input_ids=torch.tensor(ids, dtype=torch.int64),
            labels=torch.tensor([*targets[1:], IGNORE_INDEX], dtype=torch.int64),
        )

    def _at(self, index: int, error: SampleError) -> SampleError:
        return sample_error(self.source.name, self.rows[index], error)

    def _changed(self, index: int, found: str, expected: str) -> SampleError:
        return SampleError(
            f"Sample {self.rows[index]} of {self.source.name} has {found}, "
            f"but {expected} when it was indexed",
            limit="data must not change while it is in use",
            remedy="delete the size index beside the data and start again",
        )


def sample_error(source_name: str, row: int, error: SampleError) -> SampleError:
    """The same error with the sample's place in front."""
    return SampleError(
        f"Sample {row} of {source_name}: {error.value}", limit=error.limit, remedy=error.remedy
    )


def measure_sample(
    source: Source, row: int, tokenizer: TextTokenizer, image_rule: ImageRule
) -> SampleSize:
    """Size of one sample, from image headers and token counts.

    Raises:
        SampleError: If the sample cannot be used; the message names it.
    """
    try:
        grids = tuple(image_rule.grid(*image_size(data)) for data in source.images(row))
        ids, predicted = encode_turns(source.texts(row), tokenizer)
    except SampleError as error:
        raise sample_error(source.name, row, error) from error
    return SampleSize(
        grids=grids,
        num_text_tokens=len(ids),
        # The first token of a row is never predicted: every conversation starts with a marker.
        num_label_tokens=sum(predicted),
        merge_size=image_rule.merge_size,
    )
