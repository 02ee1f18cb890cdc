"""Images in memory: arrays and tensors mean what a file means, or are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from cdtrans.serving.arrays import each_image
from support import raises

RGB = np.random.default_rng(0).integers(0, 256, (9, 7, 3), dtype=np.uint8)
RGBA = np.random.default_rng(1).integers(0, 256, (9, 7, 4), dtype=np.uint8)
GREY = np.random.default_rng(2).integers(0, 256, (9, 7), dtype=np.uint8)


def arrays(images: Any) -> list[np.ndarray]:
    return [np.asarray(image) for image in each_image(images)]


WAYS: dict[str, Callable[[np.ndarray], Any]] = {
    "channels last": lambda x: x,
    "channels first": lambda x: np.moveaxis(x, -1, -3),
    "float32": lambda x: (x / 255).astype(np.float32),
    "float16": lambda x: (x / 255).astype(np.float16),
    "tensor": lambda x: torch.from_numpy(x).movedim(-1, -3),
    "float tensor with a gradient": lambda x: (torch.from_numpy(x) / 255).requires_grad_(),
    "bfloat16": lambda x: (torch.from_numpy(x) > 127).to(torch.bfloat16),
    "not contiguous": lambda x: np.repeat(x, 2, axis=-2)[..., ::2, :],
}


@pytest.mark.parametrize("way", WAYS)
def test_every_layout_and_type_is_the_same_image(way: str) -> None:
    for image in (RGB, RGBA, np.stack([RGB, RGB[::-1]])):
        made = arrays(WAYS[way](image))
        expected = list(image) if image.ndim == 4 else [image]
        if way == "bfloat16":
            expected = [255 * (one > 127) for one in expected]
        assert [one.tolist() for one in made] == [one.tolist() for one in expected]


def test_grey_images_and_batches_of_them() -> None:
    for image in (GREY, GREY[..., None], GREY[None], torch.from_numpy(GREY) / 255, [GREY]):
        (made,) = each_image(image)
        assert made.mode == "L"
        assert np.array_equal(np.asarray(made), GREY)
    assert len(arrays(np.stack([GREY, GREY])[:, None])) == 2
    assert arrays(np.zeros((0, 9, 7, 3), np.uint8)) == []
    three = np.stack([GREY, GREY, GREY])
    assert len(arrays(three)) == 1, "three axes are one image"
    assert len(arrays(three[..., None])) == len(arrays(three[:, None])) == 3


def test_several_of_different_sizes_and_kinds(tmp_path: Path) -> None:
    image = Image.fromarray(RGB)
    several = [RGB, torch.from_numpy(GREY), image, "a.png", tmp_path]
    made = list(each_image(iter(several)))
    assert [np.asarray(one).shape for one in made[:2]] == [(9, 7, 3), (9, 7)]
    assert made[2:] == [image, "a.png", tmp_path]
    assert list(each_image(np.array(["a.png", "b.png"]))) == ["a.png", "b.png"]
    assert list(each_image(np.array([tmp_path, "b.png"], dtype=object))) == [tmp_path, "b.png"]


def test_rounding_may_leave_the_range_a_little() -> None:
    image = RGB / 255
    image[0, 0, 0], image[0, 0, 1] = 1.0004, -0.0004
    assert arrays(image)[0][0, 0, :2].tolist() == [255, 0]


NAN = np.full((9, 7, 3), 0.5)
NAN[3, 2, 1] = np.nan
REFUSED: dict[str, list[Any]] = {
    "pixel-range": [
        *(RGB.astype(np.float32), RGB / 127.5 - 1, RGB / 255 * 1000, NAN, np.full((9, 7), np.inf)),
        [RGB, RGB.astype(float)],
    ],
    "pixel-type": [RGB.astype(np.int64), torch.from_numpy(RGB).int(), GREY.astype(np.uint16), GREY > 100, RGB * 1j],
    "image-shape": [
        RGB[:, :, :2],
        *(
            np.zeros(shape, np.uint8)
            for shape in ((5, 9, 7), (3, 9, 3), (8, 4, 9, 3), (0, 7, 3), (7,), (1, 1, 9, 7, 3))
        ),
        [RGB, RGB[None]],
        Image.new("RGB", (0, 7)),
        [RGB, Image.new("RGB", (7, 0))],
    ],
    "image-type": [[RGB, RGB.tolist()], [RGB, None], b"\x89PNG", {"a": RGB}, 7],
}


@pytest.mark.parametrize("code", REFUSED)
def test_what_would_be_a_guess_is_refused(code: str) -> None:
    for images in REFUSED[code]:
        with raises(code):
            list(each_image(images))
