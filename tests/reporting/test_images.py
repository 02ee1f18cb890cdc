"""Images inside the page."""

import base64
import io
from pathlib import Path

import matplotlib
import numpy as np
import torch
from PIL import Image

from cdtrans.inputs.batches import Images
from cdtrans.inputs.images import decode, resized
from cdtrans.reporting.images import THUMBNAIL_SIDE, DomainImages, heated
from tiny_task import draw


def opened(address: str) -> Image.Image:
    kind, content = address.split(",", 1)
    image = Image.open(io.BytesIO(base64.b64decode(content)))
    assert kind == f"data:image/{image.format.lower()};base64"
    return image


def test_an_image_is_shown_as_the_model_sees_it(tmp_path: Path) -> None:
    draw(tmp_path / "a.png", 1, seed=3)
    images = DomainImages(tmp_path, ("a.png",), resize=18, crop=13)
    stored = resized(decode(tmp_path / "a.png"), 18)[None]
    seen = Images(stored, np.arange(1), crop=13, mean=(0, 0, 0), std=(1, 1, 1), device=torch.device("cpu"))
    expected = next(seen.in_order(1))[0].permute(1, 2, 0) * 255
    assert np.array_equal(images.fetch([0])[0], expected.round().byte().numpy())
    assert opened(*images.thumbnails([0])).size == (THUMBNAIL_SIDE, THUMBNAIL_SIDE)


def test_vanished_and_damaged_files_are_counted_once(tmp_path: Path) -> None:
    draw(tmp_path / "a.png", 1, seed=3)
    (tmp_path / "bad.png").write_bytes(b"no image")
    images = DomainImages(tmp_path, ("gone.png", "a.png", "bad.png"), resize=18, crop=16)
    images.fetch([2, 1, 0, 1])
    assert [image is None for image in images.thumbnails([0, 1, 2, 0])] == [True, False, True, True]
    assert images.missing == 2


def test_heat_is_brightest_where_the_weight_is(tmp_path: Path) -> None:
    weights = np.zeros((2, 4))
    weights[0, 3] = 0.2
    image = np.asarray(heated(np.full((8, 8, 3), 90, np.uint8), weights)).astype(float).sum(2)
    row, column = np.unravel_index(image.argmax(), image.shape)
    assert row < THUMBNAIL_SIDE / 2
    assert column > THUMBNAIL_SIDE * 3 / 4
    assert image[:, : THUMBNAIL_SIDE // 2].max() < image.max() / 2


def test_heat_has_the_colours_of_inferno() -> None:
    """Within the share of the colours over the grey image: 60 %."""
    weights = np.linspace(0, 1, THUMBNAIL_SIDE)[None].repeat(THUMBNAIL_SIDE, axis=0)
    image = np.asarray(heated(np.zeros((8, 8, 3), np.uint8), weights)).astype(float)
    expected = matplotlib.colormaps["inferno"](np.linspace(0, 1, THUMBNAIL_SIDE))[:, :3] * 255 * 0.6
    assert np.abs(image[THUMBNAIL_SIDE // 2] - expected).max() < 7
