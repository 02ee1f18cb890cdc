"""One image file -> upright 8-bit RGB pixels, or a short cause why it cannot be read; their digest and thumbnail."""

import hashlib
import io
import os
import stat
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from cdtrans.errors import DataError

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif"})

THUMBNAIL = 16  # pixels of a thumbnail; few enough to hide compression, enough to tell similar objects apart

ARCHIVE_LEFTOVERS = "__MACOSX"  # the folder of an archive in which macOS stores metadata of every file

# Only the formats of the suffixes: otherwise PIL would also start Ghostscript for an EPS file named .jpg.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF")
_SIGNATURES = (b"\xff\xd8\xff", b"\x89PNG", b"RIFF", b"II*\0", b"MM\0*", b"GIF8")

_CAUSES: dict[type[Exception], str] = {
    FileNotFoundError: "missing, or a broken link",
    PermissionError: "no permission to read it",
    IsADirectoryError: "a folder, not a file",
    Image.DecompressionBombError: "too many pixels, it may be a decompression bomb",
}

# Possible values of white in a deep greyscale image: 16 bits for integers; for floats also 1 or 8 bits.
_WHITES = {"I": (65535.0,), "F": (1.0, 255.0, 65535.0)}

# PIL warns about big images and odd metadata; real problems are raised as UnreadableImage. The filter is for the whole
# process, because warnings.catch_warnings is not thread-safe and images are decoded in threads.
warnings.filterwarnings("ignore", module=r"PIL\.")


class UnreadableImage(Exception):
    """The file cannot be read as an image. The text is a short cause, such as 'truncated'."""


def is_image_name(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES


def decode(file: Path | bytes) -> Image.Image:
    """The first frame of a file, or of its content, as upright RGB: transparency over white, deep greyscale scaled to 8
    bits."""
    try:
        with Image.open(io.BytesIO(file) if isinstance(file, bytes) else _no_special(file), formats=_FORMATS) as image:
            return upright_rgb(image)
    except Exception as error:  # on damaged bytes PIL raises almost anything: SyntaxError, struct.error, EOFError, ...
        raise UnreadableImage(_cause(file, error)) from error


class Header(NamedTuple):
    """The properties of a file that its resized pixels do not show."""

    width: int
    height: int
    alpha: bool  # some pixels are transparent


def read_header(path: Path) -> Header:
    """Read without decoding, in a fraction of a millisecond, unless the image has an alpha channel."""
    try:
        with Image.open(_no_special(path), formats=_FORMATS) as image:
            alpha = image.has_transparency_data and np.asarray(image.convert("RGBA"))[..., 3].min() < 255
            return Header(image.width, image.height, bool(alpha))
    except Exception as error:  # as in decode
        raise UnreadableImage(_cause(path, error)) from error


def _no_special(path: Path) -> Path:
    """Refuse a pipe, whose reader would wait forever, and a device, which may never end."""
    if not stat.S_ISREG(mode := os.stat(path).st_mode) and not stat.S_ISDIR(mode):
        raise UnreadableImage("a pipe, device or other special file")
    return path


def upright_rgb(image: Image.Image) -> Image.Image:
    """Any PIL image as upright 8-bit RGB. EXIF that cannot be parsed counts as none."""
    image.load()
    rgb = _rgb(image)
    rgb.info.clear()  # the orientation is all that PIL needs, and damage elsewhere cannot stop it
    with suppress(Exception):
        rgb.getexif()[ExifTags.Base.Orientation] = image.getexif()[ExifTags.Base.Orientation]
        ImageOps.exif_transpose(rgb, in_place=True)
    return rgb


def resized(image: Image.Image, size: int) -> np.ndarray:
    """Both sides to `size`, aspect ignored: the pixels of torchvision's Resize((size, size))."""
    return np.array(image.resize((size, size), Image.Resampling.BILINEAR))  # [size, size, 3] uint8


def pixel_digest(pixels: np.ndarray) -> str:
    """A hash of the pixels: equal images have equal digests, whatever their file names."""
    return hashlib.blake2b(pixels.tobytes(), digest_size=16).hexdigest()


class Traces(NamedTuple):
    """Digests and thumbnails of a domain's images, which show copies."""

    paths: Sequence[str]
    digests: Sequence[str]
    thumbnails: np.ndarray  # uint8 [N, THUMBNAIL, THUMBNAIL, 3]


def thumbnails(pixels: np.ndarray) -> np.ndarray:
    """uint8 [N, size, size, 3] -> [N, THUMBNAIL, THUMBNAIL, 3]: each pixel is the mean of its area."""
    count, size = pixels.shape[:2]
    begins = np.arange(THUMBNAIL) * size // THUMBNAIL
    lengths = np.maximum(np.diff(begins, append=size), 1)  # some pixels of an image smaller than THUMBNAIL count twice
    flat = pixels.reshape(count, size, -1)
    strips = [flat[:, i : i + n].sum(axis=1, dtype=np.uint32) for i, n in zip(begins, lengths, strict=True)]
    rows = np.stack(strips, axis=1).reshape(count, THUMBNAIL, size, 3)
    sums = np.add.reduceat(rows, begins, axis=2)  # [N, THUMBNAIL, THUMBNAIL, 3]
    means: np.ndarray = np.rint(sums / np.outer(lengths, lengths)[..., None]).astype(np.uint8)
    return means


def judge_unreadable(name: str, bad: int, total: int, first: str, cause: str, max_bad: float) -> str:
    """One rule for every verb: a few unreadable files are skipped with the returned warning, many are an error."""
    problem = f"{bad} of {total} {name}files cannot be read (the first: {first!r}, {cause})"
    if bad > max_bad * total:
        advice = f"repair or remove them, or raise --max-bad above {max_bad:g}"
        raise DataError("too-many-unreadable", f"{problem}; {advice}.")
    return f"{problem}; {'it is' if bad == 1 else 'they are'} skipped."


def _rgb(image: Image.Image) -> Image.Image:
    if whites := _WHITES.get(image.mode[0]):
        return _eight_bits(image, whites).convert("RGB")
    if image.mode == "La":  # PIL can convert premultiplied grey only to LA
        image = image.convert("LA")
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")


def _eight_bits(image: Image.Image, whites: tuple[float, ...]) -> Image.Image:
    """Scale deep greyscale by the narrowest range that contains it, or else by its own minimum and maximum.

    PIL's own conversion would clip at 255 and turn most 16-bit images white.
    """
    values = np.nan_to_num(np.asarray(image, dtype=np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    low, high = float(values.min()), float(values.max())
    white = next((white for white in whites if low >= 0 and high <= white), None)
    if white is not None:
        low, high = 0.0, white
    scale = 255 / (high - low) if high > low else 0.0
    return Image.fromarray(np.rint((values - low) * scale).astype(np.uint8))


def _cause(file: Path | bytes, error: Exception) -> str:
    if cause := _CAUSES.get(type(error)):
        return cause
    match error:
        case UnreadableImage():
            return str(error)
        case UnidentifiedImageError():
            with io.BytesIO(file) if isinstance(file, bytes) else file.open("rb") as content:
                start = content.read(16)
            if not start:
                return "empty file"
            return "truncated or damaged" if start.startswith(_SIGNATURES) else "not an image of a known format"
        case OSError() if error.errno is not None:
            return f"cannot be read ({error.strerror})"
        case OSError() if "truncated" in str(error).lower():
            return "truncated"
    detail = " ".join(str(error).split())[:80] or type(error).__name__
    return f"truncated or damaged ({detail})" if isinstance(error, OSError) else f"cannot be decoded ({detail})"
