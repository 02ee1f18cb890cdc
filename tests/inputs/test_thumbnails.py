"""Thumbnails: means of what they stand for, and what a picture is recognised by."""

import numpy as np

from cdtrans.inputs.images import pixel_digest
from cdtrans.inputs.thumbnails import SIDE, thumbnail, trace


def test_a_pixel_is_the_mean_of_its_block() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4 * SIDE, 4 * SIDE, 3), dtype=np.uint8)
    means = pixels.reshape(SIDE, 4, SIDE, 4, 3).mean(axis=(1, 3))
    assert np.abs(thumbnail(pixels) - means).max() <= 0.5


def test_a_picture_of_any_size_will_do() -> None:
    for size in (1, 8, 18, 37, 256, 5000):  # the largest: no sum may overflow
        np.testing.assert_array_equal(thumbnail(np.full((size, size, 3), 77, np.uint8)), np.full((SIDE, SIDE, 3), 77))


def test_a_size_that_sixteen_does_not_divide_leaves_no_pixel_out() -> None:
    places = []
    for n in range(37):  # one bright pixel, along a diagonal
        pixels = np.zeros((37, 37, 3), np.uint8)
        pixels[n, 36 - n] = 240
        ((row, column),) = np.argwhere(thumbnail(pixels)[..., 0])
        places.append((int(row), int(column)))
    rows, columns = zip(*places, strict=True)
    assert list(rows) == sorted(rows) == list(columns[::-1])
    assert set(rows) == set(range(SIDE))


def test_a_trace_is_of_the_same_pixels() -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    found = trace(pixels)
    assert found.digest == pixel_digest(pixels)
    np.testing.assert_array_equal(found.thumbnail, thumbnail(pixels))
