"""Copies of an image are recognised however they were saved, and two images are never taken for one."""

import io

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from PIL import Image, ImageDraw

from cdtrans.inputs.images import THUMBNAIL as SIDE, pixel_digest, resized, thumbnails
from cdtrans.trust import duplicates
from cdtrans.trust.duplicates import LIKENESS, PLAIN, ThumbnailVectors, exact_groups, near_groups, near_pairs

STORED = 128  # pixels of a stored image here


def texture(seed: int, size: tuple[int, int] = (320, 240)) -> Image.Image:
    """Smooth random colours, as different from each other as photographs; no pixel is close to black or white."""
    coarse = np.random.default_rng(seed).integers(60, 190, (9, 9, 3), np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)


def product(seed: int) -> Image.Image:
    """A dark thing on white, a third of the image wide: most of it is background."""
    rng = np.random.default_rng(seed)
    image = Image.new("RGB", (120, 120), "white")
    pen = ImageDraw.Draw(image)
    for _ in range(4):
        x, y, w, h = rng.integers((35, 35, 8, 8), (60, 60, 30, 30)).tolist()
        pen.rectangle((x, y, x + w, y + h), fill=tuple(rng.integers(0, 160, 3).tolist()))
    return image


def small(images: list[Image.Image]) -> np.ndarray:
    return thumbnails(np.stack([resized(image, STORED) for image in images]))


def as_jpeg(image: Image.Image, quality: int) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return Image.open(file).convert("RGB")


def scaled(image: Image.Image, factor: float) -> Image.Image:
    return image.resize((round(image.width * factor), round(image.height * factor)), Image.Resampling.BILINEAR)


def relit(image: Image.Image, gain: float, offset: float) -> Image.Image:
    return Image.fromarray(np.clip(np.asarray(image) * gain + offset, 0, 255).astype(np.uint8))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    quality=st.integers(50, 95),
    factor=st.floats(0.5, 2.0),
    gain=st.floats(0.7, 1.2),
    offset=st.floats(-15, 15),
)
def test_a_copy_is_found_whatever_was_done_to_it(seed: int, quality: int, factor: float, gain: float, offset: float):
    original, stranger = texture(seed), texture(seed + 1)
    copy = as_jpeg(scaled(relit(original, gain, offset), factor), quality)
    assert near_pairs(small([original, stranger, copy])).tolist() == [[0, 2]]


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), draw=st.sampled_from([texture, product]), count=st.sampled_from([2, 30, 120]))
def test_different_images_are_never_the_same(seed: int, draw, count: int) -> None:
    assert len(near_pairs(small([draw(seed + n) for n in range(count)]))) == 0


def test_different_things_behind_one_mask_are_not_the_same() -> None:
    """The round mask of a microscope is most of every image, and all images have it."""
    y, x = np.mgrid[:64, :64] - 31.5
    inside = (x**2 + y**2 < 28**2)[..., None]
    images = [np.where(inside, 150 + (np.asarray(texture(n, (64, 64))) / 3), 5).astype(np.uint8) for n in range(150)]
    masked = thumbnails(np.stack([*images, images[3]]))
    assert near_pairs(masked).tolist() == [[3, 150]]
    assert len(near_pairs(masked[:50])) > 100  # too few to know what they share: then the mask is the image


def test_white_pages_are_not_copies_of_each_other() -> None:
    """Only noise tells them apart, or makes them alike."""
    rng = np.random.default_rng(0)
    pages = np.clip(250 + rng.normal(0, 2, (40, STORED, STORED, 3)), 0, 255).astype(np.uint8)
    pages[7] = pages[3]
    plain = thumbnails(pages)
    assert len(near_pairs(plain)) == 0
    groups = near_groups([pixel_digest(page) for page in pages], plain)
    assert np.flatnonzero(groups != np.arange(40)).tolist() == [7]


def likeness(small: np.ndarray) -> np.ndarray:
    """[N, N] of each pair i < j, by comparing all with all; -1 where there is nothing to compare."""
    vectors, spread = ThumbnailVectors(small).vectors(slice(None))
    comparable = np.triu(np.ones((len(small), len(small)), bool), 1) & (spread >= PLAIN)[:, None] & (spread >= PLAIN)
    return np.where(comparable, vectors @ vectors.T, -1)


def assert_exact(small: np.ndarray, tile: tuple[int, int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(duplicates, "TILE_ROWS", tile[0])
        patch.setattr(duplicates, "TILE_COLUMNS", tile[1])
        pairs = {tuple(pair) for pair in near_pairs(small).tolist()}
    rounding = 1e-5  # two sums of 768 numbers may differ by that, and pairs so close to the limit may be either
    alike = likeness(small)
    assert pairs >= {tuple(pair) for pair in np.argwhere(alike >= LIKENESS + rounding).tolist()}
    assert pairs <= {tuple(pair) for pair in np.argwhere(alike >= LIKENESS - rounding).tolist()}


TILES = st.sampled_from([(7, 13), (64, 50), (512, 8192)])  # the last is the real one


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 240),
    families=st.integers(1, 40),
    noise=st.floats(0, 12),
    tile=TILES,
)
def test_the_search_finds_exactly_what_comparing_all_finds(seed, count, families, noise, tile) -> None:
    """Images scattered around a few, at every distance from each other."""
    rng = np.random.default_rng(seed)
    parents = rng.integers(0, 256, (families, SIDE, SIDE, 3))
    spoilt = parents[rng.integers(0, families, count)] + rng.normal(0, noise, (count, SIDE, SIDE, 3))
    assert_exact(np.clip(spoilt, 0, 255).astype(np.uint8), tile)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), count=st.integers(40, 90), tile=TILES)
def test_the_search_finds_neighbours_along_the_axis_that_it_sorts_by(seed: int, count: int, tile) -> None:
    """Images on the way from one to another: all their distance lies along the first axis."""
    rng = np.random.default_rng(seed)
    one, other = rng.integers(0, 256, (2, SIDE, SIDE, 3))
    place = rng.random((count, 1, 1, 1))
    assert_exact((one * place + other * (1 - place)).astype(np.uint8), tile)


def test_a_film_of_one_thing_is_one_group_and_takes_no_more_room_than_allowed(monkeypatch) -> None:
    monkeypatch.setattr(duplicates, "LOOKALIKES", 3)
    rng = np.random.default_rng(0)
    frames = np.clip(np.asarray(texture(0, (SIDE, SIDE))) + rng.normal(0, 1, (90, SIDE, SIDE, 3)), 0, 255)
    frames = frames.astype(np.uint8)
    assert len(near_pairs(frames)) <= 3 * 90
    assert set(near_groups([str(n) for n in range(90)], frames)) == {0}


def test_no_image_and_one_image() -> None:
    assert near_pairs(small([texture(0)])).tolist() == []
    assert near_groups([], np.empty((0, SIDE, SIDE, 3), np.uint8)).tolist() == []


def test_groups_are_numbered_after_their_first_image() -> None:
    assert exact_groups(["a", "b", "a", "c", "b"]).tolist() == [0, 1, 0, 3, 1]
    assert exact_groups([]).tolist() == []
    one, two = texture(1), texture(2)
    chain = [two, one, as_jpeg(one, 60), two, relit(one, 0.9, 0)]
    assert near_groups(["a", "b", "c", "a", "d"], small(chain)).tolist() == [0, 1, 1, 0, 1]
