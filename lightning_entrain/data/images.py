"""Image files: size from the header, pixels as packed patches, each failure named."""

from __future__ import annotations

import io
import warnings

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from lightning_entrain.errors import SampleError
from lightning_entrain.workload.image_rule import ImageRule

MEAN = (0.48145466, 0.4578275, 0.40821073)
"""Mean of the colours (red, green, blue) that Qwen2.5-VL subtracts, of values in [0, 1]."""
STD = (0.26862954, 0.26130258, 0.27577711)
"""Standard deviation of the colours that Qwen2.5-VL divides by."""

_REMEDY = "replace or remove the file, or set on_bad_sample=skip"
_END_MARKS = {"PNG": b"IEND", "JPEG": b"\xff\xd9"}


def open_image(data: bytes) -> Image.Image:
    """Read an image file's header; its pixels are decoded later, on demand.

    Raises:
        SampleError: If the bytes are no image, or one whose end is missing.
    """
    try:
        with warnings.catch_warnings():
            # Pillow only warns between one and two times its own limit; ImageRule sets ours.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data))
    except Image.DecompressionBombError as error:
        raise SampleError(
            f"An image of {len(data)} bytes claims an absurd size ({error})",
            limit="the size Pillow accepts",
            remedy=_REMEDY,
        ) from error
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        raise SampleError(
            f"{len(data)} bytes are not a readable image ({_short(error)})",
            limit="an image file Pillow can open",
            remedy=_REMEDY,
        ) from error
    mark = _END_MARKS.get(image.format or "")
    if mark is not None and data.rfind(mark) < 0:
        raise SampleError(
            f"A {image.format} image of {len(data)} bytes is truncated: its end is missing",
            limit="a whole image file",
            remedy=_REMEDY,
        )
    return image


def image_size(data: bytes) -> tuple[int, int]:
    """Height and width in pixels, from the header alone.

    Raises:
        SampleError: As :func:`open_image`.
    """
    image = open_image(data)
    return image.height, image.width


def image_patches(data: bytes, rule: ImageRule) -> Tensor:
    """Decode, resize, normalise and cut one image.

    Args:
        data: The encoded image file.
        rule: The size rule.

    Returns:
        Patches ``[patches, patch_dim]``, float32, in the order of :func:`patchify`.

    Raises:
        SampleError: If the file cannot be decoded or breaks the rule's limits.
    """
    image = open_image(data)
    height, width = rule.resized(image.height, image.width)
    try:
        picture = _opaque(image).resize((width, height), Image.Resampling.BICUBIC)
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        raise SampleError(
            f"An image of {len(data)} bytes cannot be decoded ({_short(error)})",
            limit="a whole image file",
            remedy=_REMEDY,
        ) from error
    values = torch.from_numpy(np.array(picture)).float() / 255
    return patchify((values - torch.tensor(MEAN)) / torch.tensor(STD), rule)


def patchify(picture: Tensor, rule: ImageRule) -> Tensor:
    """Cut a picture into patches in Qwen2.5-VL's order.

    Patches that merge into one vision token are neighbours; tokens go row by row. Within a patch
    the order is colour, frame, row, column; a still picture's frame is repeated.

    Args:
        picture: ``[height, width, 3]``, both sides multiples of ``rule.factor``.
        rule: Patch, merge and frame sizes.

    Returns:
        ``[patches, patch_dim]``, contiguous.
    """
    patch, merge = rule.patch_size, rule.merge_size
    height, width = picture.shape[:2]
    blocks = picture.reshape(
        height // rule.factor, merge, patch, width // rule.factor, merge, patch, 3
    )
    # token row, token column, patch row, patch column, colour, row, column
    blocks = blocks.permute(0, 3, 1, 4, 6, 2, 5).unsqueeze(5)
    blocks = blocks.expand(-1, -1, -1, -1, -1, rule.temporal_patch_size, -1, -1)
    return blocks.reshape(-1, rule.patch_dim)


def _opaque(image: Image.Image) -> Image.Image:
    """The image in three colours; what is transparent becomes white, as paper is."""
    if "A" in image.getbands() or "transparency" in image.info:
        layer = image.convert("RGBA")
        paper = Image.new("RGBA", layer.size, "white")
        image = Image.alpha_composite(paper, layer)
    return image.convert("RGB")


def _short(error: Exception) -> str:
    # Pillow names the address of its buffer, which differs from run to run.
    return str(error).split(" <_io.")[0] or type(error).__name__
