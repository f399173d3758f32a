from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from lightning_entrain.data.images import image_patches, image_size
from lightning_entrain.data.synthetic import SyntheticSource
from lightning_entrain.errors import SampleError
from lightning_entrain.workload.image_rule import ImageRule
from tests.data.helpers import picture


def noise(width: int, height: int, kind: str = "PNG", mode: str = "RGB") -> bytes:
    channels = {"RGB": 3, "L": 1, "RGBA": 4}[mode]
    values = np.random.default_rng(0).integers(0, 256, (height, width, channels), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(values.squeeze(), mode).save(file, kind)
    return file.getvalue()


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA"])
@pytest.mark.parametrize("size", [(20, 31), (224, 112), (301, 600)])
def test_patches_equal_those_of_the_image_processor(size: tuple[int, int], mode: str) -> None:
    data = noise(*size, mode=mode)
    rule = ImageRule(max_pixels=100_000)
    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": rule.min_pixels, "longest_edge": rule.max_pixels}
    )
    expected = processor(images=Image.open(io.BytesIO(data)), return_tensors="pt")
    found = image_patches(data, rule)
    assert tuple(expected["image_grid_thw"][0].tolist()) == rule.grid(size[1], size[0])
    assert found.dtype == torch.float32
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected["pixel_values"], rtol=0, atol=2e-6)


def test_a_sixty_pixel_and_a_three_thousand_pixel_image() -> None:
    rule = ImageRule(max_pixels=200_704)
    small, large = image_patches(picture(60, 60), rule), image_patches(picture(3000, 2000), rule)
    assert small.shape == (16, 1176)
    assert 900 < len(large) <= 1024


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_the_size_is_read_without_decoding(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = picture(123, 45, kind)

    def refuse(self: object) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", refuse)
    assert image_size(data) == (45, 123)
    with pytest.raises(AssertionError, match="decoded"):
        image_patches(data, ImageRule())


@pytest.mark.parametrize("data", [b"", b"no image", b"\x89PNG\r\n\x1a\n", bytes(1000)])
def test_bytes_that_are_no_image_are_named(data: bytes) -> None:
    with pytest.raises(SampleError, match=f"^{len(data)} bytes are not a readable image"):
        image_size(data)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_truncated_image_is_found_from_its_missing_end(kind: str) -> None:
    data = noise(80, 80, kind)
    with pytest.raises(SampleError, match=f"A {kind} image of .* is truncated"):
        image_size(data[: len(data) // 2])


def test_damage_inside_an_image_is_found_when_it_is_decoded() -> None:
    data = bytearray(noise(80, 80))
    middle = len(data) // 2
    data[middle : middle + 400] = bytes(400)
    image_size(bytes(data))
    with pytest.raises(SampleError, match="cannot be decoded"):
        image_patches(bytes(data), ImageRule())


def test_a_decompression_bomb_is_not_decoded() -> None:
    header = picture(10, 10)
    bomb = header[:16] + (30_000).to_bytes(4, "big") * 2 + header[24:]
    with pytest.raises(SampleError, match=r"absurd size|not a readable image"):
        image_patches(bomb, ImageRule())
    medium = header[:16] + (11_000).to_bytes(4, "big") * 2 + header[24:]
    with pytest.raises(SampleError, match=r"11000x11000 .* at most 100000000 pixels"):
        # A checksum guards PNG headers; formats without one reach the rule with such numbers.
        ImageRule().grid(11_000, 11_000)
    with pytest.raises(SampleError):
        image_patches(medium, ImageRule())


def test_a_large_bmp_header_reaches_the_rule() -> None:
    data = bytearray(picture(4, 4, "BMP"))
    data[18:26] = (12_000).to_bytes(4, "little") * 2
    with pytest.raises(SampleError, match="144000000 pixels"):
        image_patches(bytes(data), ImageRule())


def test_synthetic_samples_are_seeded_and_of_many_sizes() -> None:
    first, again, other = (SyntheticSource(30, seed=seed) for seed in (1, 1, 2))
    assert [first.images(i) for i in range(30)] == [again.images(i) for i in range(30)]
    assert [first.texts(i) for i in range(30)] == [again.texts(i) for i in range(30)]
    assert [first.images(i) for i in range(30)] != [other.images(i) for i in range(30)]
    sides = [image_size(data)[0] for i in range(30) for data in first.images(i)]
    assert len(sides) == 24
    assert max(sides) > 4 * min(sides)
