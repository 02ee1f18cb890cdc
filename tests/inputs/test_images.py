"""Every kind of image becomes the right RGB pixels, and every broken file one short cause."""

import io
import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from PIL import Image
from torchvision.transforms import Resize

from cdtrans.inputs.images import (
    IMAGE_SUFFIXES,
    THUMBNAIL as SIDE,
    UnreadableImage,
    decode,
    resized,
    thumbnails,
    upright_rgb,
)

ORIENTATION = 0x0112
NOBODY = 65534
PHOTO = Image.effect_mandelbrot((60, 40), (-2, -1.2, 1, 1.2), 40)  # grey
COLOUR = Image.merge("RGB", (PHOTO, PHOTO.transpose(Image.Transpose.ROTATE_180), PHOTO.point(lambda v: 255 - v)))
FORMATS = sorted(IMAGE_SUFFIXES)
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL.TiffImagePlugin")  # pytest overrules our own filter


def saved(image: Image.Image, path: Path, **options: object) -> Path:
    image.save(path, **options)
    return path


def pixels(path: Path) -> np.ndarray:
    image = decode(path)
    assert image.mode == "RGB"
    return np.asarray(image)


def grey(*levels: int) -> np.ndarray:
    """The one-row RGB image that these grey levels should become."""
    return np.repeat(np.array(levels, dtype=np.uint8)[None, :, None], 3, axis=2)


def cause(path: Path) -> str:
    with pytest.raises(UnreadableImage) as raised:
        decode(path)
    return str(raised.value)


def encoded(suffix: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    COLOUR.save(buffer, Image.registered_extensions()[suffix], **options)
    return buffer.getvalue()


def png_that_claims(width: int, height: int) -> bytes:
    return png((b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(bytes(99))))


def png(*chunks: tuple[bytes, bytes]) -> bytes:
    body = (struct.pack(">I", len(d)) + name + d + struct.pack(">I", zlib.crc32(name + d)) for name, d in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(body)


@pytest.mark.parametrize("suffix", [".png", ".bmp", ".tif", ".webp"])
def test_lossless_formats_keep_every_pixel(tmp_path, suffix):
    options = {"lossless": True} if suffix == ".webp" else {}
    assert np.array_equal(pixels(saved(COLOUR, tmp_path / f"a{suffix}", **options)), np.asarray(COLOUR))


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp", ".tif"])
@pytest.mark.parametrize("orientation", [*range(1, 9), 77])
def test_exif_rotation_is_applied(tmp_path, suffix, orientation):
    """An upright image, turned as a camera would store it, comes back upright. Quarters of one colour survive JPEG."""
    upright = np.zeros((32, 48, 3), dtype=np.uint8)
    upright[:16, :24], upright[16:, 24:] = 255, 128
    turned = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright),
        7: upright.transpose(1, 0, 2)[::-1, ::-1],
        8: np.rot90(upright, -1),
        77: upright,  # unknown
    }[orientation]
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    path = saved(Image.fromarray(np.ascontiguousarray(turned)), tmp_path / f"a{suffix}", exif=exif)
    assert np.abs(pixels(path).astype(int) - upright).max() <= 8


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp"])
@pytest.mark.parametrize(
    "exif",
    [b"Exif\0\0garbage", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0MM\0*\0\0\0\x08\0\x09\x01\x12", b"\xff" * 50],
)
def test_broken_exif_does_not_cost_the_image(tmp_path, suffix, exif):
    plain, broken = saved(COLOUR, tmp_path / f"plain{suffix}"), saved(COLOUR, tmp_path / f"a{suffix}", exif=exif)
    assert np.array_equal(pixels(broken), pixels(plain))


def test_greyscale_and_one_bit(tmp_path):
    assert np.array_equal(pixels(saved(PHOTO, tmp_path / "a.png")), np.repeat(np.asarray(PHOTO)[..., None], 3, axis=2))
    one_bit = Image.fromarray(np.array([[0, 255]], dtype=np.uint8)).convert("1")
    assert np.array_equal(pixels(saved(one_bit, tmp_path / "b.png")), grey(0, 255))


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
@pytest.mark.parametrize("suffix", [".png", ".tif", ".webp"])
def test_alpha_is_laid_over_white(tmp_path, mode, suffix):
    image = Image.new("RGBA", (3, 1), (0, 0, 0, 0))
    image.putpixel((1, 0), (0, 0, 0, 255))
    image.putpixel((2, 0), (0, 0, 0, 128))
    path = saved(image.convert(mode), tmp_path / f"a{suffix}", **({"lossless": True} if suffix == ".webp" else {}))
    assert np.array_equal(pixels(path), grey(255, 0, 127))


def test_premultiplied_grey_is_laid_over_white():
    """A half transparent black and a half transparent white; Pillow 13 opens TIFFs so."""
    image = Image.frombytes("La", (2, 1), bytes([0, 128, 128, 128]))
    assert np.array_equal(np.asarray(upright_rgb(image)), grey(127, 255))


@pytest.mark.parametrize("suffix", [".png", ".gif"])
def test_transparent_palette_entry_is_laid_over_white(tmp_path, suffix):
    image = Image.new("P", (2, 1), 0)
    image.putpalette([10, 20, 30, 200, 100, 0])
    image.putpixel((1, 0), 1)
    opaque = pixels(saved(image, tmp_path / f"opaque{suffix}"))
    assert np.array_equal(opaque, [[[10, 20, 30], [200, 100, 0]]])
    transparent = pixels(saved(image, tmp_path / f"a{suffix}", transparency=0))
    assert np.array_equal(transparent, [[[255, 255, 255], [200, 100, 0]]])
    if suffix == ".png":
        image.putpalette([0, 0, 0, 0, 0, 0])
        assert np.array_equal(pixels(saved(image, tmp_path / "b.png", transparency=bytes([128, 255]))), grey(127, 0))


def test_transparent_colour_of_rgb_and_grey_png(tmp_path):
    image = Image.fromarray(np.array([[[9, 9, 9], [1, 2, 3]]], dtype=np.uint8))
    path = saved(image, tmp_path / "a.png", transparency=(9, 9, 9))
    assert np.array_equal(pixels(path), [[[255, 255, 255], [1, 2, 3]]])
    assert np.array_equal(pixels(saved(image.convert("L"), tmp_path / "b.png", transparency=9)), grey(255, 2))


def test_cmyk_jpeg(tmp_path):
    red = pixels(saved(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), tmp_path / "a.jpg"))
    assert np.abs(red.astype(int) - (255, 0, 0)).max() <= 4


@pytest.mark.parametrize(
    ("mode", "kind", "levels", "expected"),
    [
        ("I;16", "<u2", (0, 257, 128 * 257, 200 * 257, 65535), (0, 1, 128, 200, 255)),
        ("I;16", "<u2", (0, 257, 2 * 257), (0, 1, 2)),  # the dark one stays dark
        ("I;16B", ">u2", (0, 128 * 257, 65535), (0, 128, 255)),
        ("I", "<i4", (0, 128 * 257, 65535), (0, 128, 255)),
        ("I", "<i4", (0, 10**6, 2 * 10**6), (0, 128, 255)),
        ("I", "<i4", (-1000, 0, 1550), (0, 100, 255)),
        ("F", "<f4", (0.0, 0.2, 1.0), (0, 51, 255)),
        ("F", "<f4", (0.0, 51.0, 254.0), (0, 51, 254)),
        ("F", "<f4", (0.0, 51 * 257.0, 65535.0), (0, 51, 255)),
        ("F", "<f4", (-1.0, 0.0, 1.0), (0, 128, 255)),
        ("F", "<f4", (-3.0, -3.0, -3.0), (0, 0, 0)),
        ("F", "<f4", (np.nan, np.inf, 1.0), (0, 0, 255)),
    ],
)
def test_deep_greyscale_is_scaled_not_clipped(tmp_path, mode, kind, levels, expected):
    image = Image.frombytes(mode, (len(levels), 1), np.array(levels, kind).tobytes())
    for suffix in (".tif", ".png") if mode == "I;16" else (".tif",):
        path = saved(image, tmp_path / f"a{suffix}")
        with Image.open(path) as stored:
            assert stored.mode[0] == mode[0]
        assert np.array_equal(pixels(path), grey(*expected))


def test_16_bit_rgb_png(tmp_path):
    row = struct.pack(">6H", 0x1234, 0x5678, 0x9ABC, 0xFFFF, 0, 0x8000)
    header = struct.pack(">IIBBBBB", 2, 1, 16, 2, 0, 0, 0)
    path = tmp_path / "a.png"
    path.write_bytes(png((b"IHDR", header), (b"IDAT", zlib.compress(b"\0" + row)), (b"IEND", b"")))
    assert np.array_equal(pixels(path), [[[0x12, 0x56, 0x9A], [0xFF, 0, 0x80]]])


@pytest.mark.parametrize("suffix", [".gif", ".webp", ".png", ".tif"])
def test_first_frame_of_many(tmp_path, suffix):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("white", "black", "black")]
    options = {"lossless": True} if suffix == ".webp" else {}
    path = saved(frames[0], tmp_path / f"a{suffix}", save_all=True, append_images=frames[1:], **options)
    assert (pixels(path) == 255).all()


def test_the_suffix_may_lie_about_the_format(tmp_path):
    assert np.array_equal(pixels(saved(COLOUR, tmp_path / "a.png").rename(tmp_path / "a.jpg")), np.asarray(COLOUR))


@pytest.mark.parametrize("suffix", FORMATS)
def test_an_empty_or_truncated_file(tmp_path, suffix):
    content, path = encoded(suffix), tmp_path / f"a{suffix}"
    for part, expected in ((0, "empty file"), (0.5, "truncated"), (0.95, "truncated")):
        path.write_bytes(content[: int(part * len(content))])
        assert expected in cause(path)


@pytest.mark.parametrize(
    ("expected", "place"),
    [
        ("truncated or damaged", lambda path: path.write_bytes(encoded(".jpg")[:4])),
        ("truncated", lambda path: path.write_bytes(encoded(".jpg")[:-2])),
        ("not an image of a known format", lambda path: path.write_text("<html>404 Not Found</html>")),
        ("not an image of a known format", lambda path: COLOUR.save(path, "EPS")),  # PIL would start Ghostscript
        ("missing, or a broken link", lambda path: None),
        ("missing, or a broken link", lambda path: path.symlink_to(path.with_name("gone.jpg"))),
        ("a folder, not a file", lambda path: path.mkdir()),
        (
            "too many pixels, it may be a decompression bomb",
            lambda path: path.write_bytes(png_that_claims(60_000, 60_000)),
        ),
    ],
)
def test_a_file_that_is_no_image_has_a_short_cause(tmp_path, expected, place):
    place(tmp_path / "a.jpg")
    assert cause(tmp_path / "a.jpg") == expected


def test_a_file_without_read_permission(tmp_path):
    path = saved(COLOUR, tmp_path / "a.png")
    path.chmod(0)
    user = os.geteuid()
    os.seteuid(NOBODY if user == 0 else user)  # permission bits do not bind root
    try:
        assert "permission" in cause(path)
    finally:
        os.seteuid(user)


def test_pil_prints_no_warning(tmp_path):
    """Each of these files makes PIL warn: a size near the limit, and EXIF that cannot be parsed."""
    big = tmp_path / "big.png"
    big.write_bytes(png_that_claims(10_000, 10_000))
    odd = saved(COLOUR, tmp_path / "odd.jpg", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x09\x01\x12")
    for preparation, quiet in (("", True), ("import warnings; warnings.resetwarnings()", False)):
        script = f"""
import pathlib, sys
from cdtrans.inputs import images
{preparation}
for path in map(pathlib.Path, sys.argv[1:]):
    try:
        images.decode(path)
    except images.UnreadableImage:
        pass
"""
        done = subprocess.run([sys.executable, "-c", script, big, odd], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert (done.stderr == "") == quiet, done.stderr


@settings(deadline=None)
@given(suffix=st.sampled_from(FORMATS), data=st.data())
def test_damaged_bytes_give_an_image_or_a_cause(tmp_path_factory, suffix, data):
    content = bytearray(encoded(suffix))
    spots = st.integers(0, len(content) - 1) | st.integers(0, 100)
    for spot, value in data.draw(st.lists(st.tuples(spots, st.integers(0, 255)), min_size=1, max_size=20)):
        content[spot] = value
    path = tmp_path_factory.getbasetemp() / f"damaged{suffix}"
    path.write_bytes(content)
    try:
        answer = decode(path).mode
    except UnreadableImage as error:
        answer = str(error)
    assert answer
    assert "\n" not in answer


@pytest.mark.parametrize("size", [7, 32, 40, 60, 224])
def test_resized_is_torchvisions_resize(size):
    small = resized(COLOUR, size)
    assert (small.dtype, small.shape, small.flags.writeable) == (np.uint8, (size, size, 3), True)
    assert np.array_equal(small, np.asarray(Resize((size, size))(COLOUR)))


# Thumbnails


def test_an_image_of_any_size_has_a_thumbnail() -> None:
    for size in (1, 8, 18, 37, 256, 5000):  # the largest: no sum may overflow
        assert (thumbnails(np.full((2, size, size, 3), 77, np.uint8)) == np.full((2, SIDE, SIDE, 3), 77)).all()


@pytest.mark.parametrize("size", [SIDE, 37, 64])
def test_a_pixel_of_a_thumbnail_is_the_mean_of_its_area(size: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, size, size, 3), dtype=np.uint8)
    small, edges = thumbnails(pixels), np.arange(SIDE + 1) * size // SIDE
    for row, column in np.ndindex(SIDE, SIDE):
        area = pixels[:, edges[row] : edges[row + 1], edges[column] : edges[column + 1]]
        assert np.abs(small[:, row, column] - area.mean(axis=(1, 2))).max() <= 0.5
