"""Thumbnails: means of what they stand for, the same from a store and from files."""

from pathlib import Path

import numpy as np

from cdtrans.data.images import decode, resized
from cdtrans.data.stream import StreamedPixels
from cdtrans.trust import thumbnails
from cdtrans.trust.thumbnails import SIDE, make_thumbnails
from stores import make_images


def test_a_pixel_is_the_mean_of_its_block() -> None:
    stored = np.random.default_rng(0).integers(0, 256, (3, 4 * SIDE, 4 * SIDE, 3), dtype=np.uint8)
    means = stored.reshape(3, SIDE, 4, SIDE, 4, 3).mean(axis=(2, 4))
    assert np.abs(make_thumbnails(stored, np.array([2, 0])) - means[[2, 0]]).max() <= 0.5


def test_any_size_of_store_will_do() -> None:
    for size in (8, 18, 37, 256):
        flat = np.full((1, size, size, 3), 77, np.uint8)
        np.testing.assert_array_equal(make_thumbnails(flat, np.array([0])), np.full((1, SIDE, SIDE, 3), 77))
    assert make_thumbnails(flat, np.array([], dtype=int)).shape == (0, SIDE, SIDE, 3)


def test_streamed_images_give_the_same_in_their_order(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(thumbnails, "STREAMED_IMAGES", 4)
    monkeypatch.setattr(thumbnails, "BLOCK_BYTES", 3 * 40 * 40 * 3)
    files = make_images(tmp_path / "images", 10)
    stored = np.stack([resized(decode(file), 40) for file in files])
    rows = np.array([9, 3, 4, 0, 1, 8, 2])
    np.testing.assert_array_equal(make_thumbnails(StreamedPixels(files, 40), rows), make_thumbnails(stored, rows))


def test_a_size_that_sixteen_does_not_divide_leaves_no_pixel_out() -> None:
    stored = np.zeros((37, 37, 37, 3), np.uint8)
    stored[range(37), range(37), range(36, -1, -1)] = 240  # one bright pixel an image, along a diagonal
    places = np.argwhere(make_thumbnails(stored, np.arange(37))[..., 0])  # [37, 3]
    assert places[:, 0].tolist() == list(range(37))
    rows, columns = places[:, 1], places[:, 2]
    assert rows.tolist() == sorted(rows) == columns[::-1].tolist()
    assert set(rows) == set(range(SIDE))
