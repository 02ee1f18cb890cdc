"""Thumbnails and heat maps as data URLs inside the page."""

import base64
import io
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from cdtrans.inputs.images import UnreadableImage
from cdtrans.inputs.stream import decode_in_order
from cdtrans.record.record import RunRecord
from cdtrans.runtime.ranks import processor_count

THUMBNAIL_SIDE = 144  # pixels of a thumbnail: twice its size on the page, for screens of double density
QUALITY = 80  # JPEG quality; a photo takes about 6 kB
INFERNO = np.array(  # matplotlib's colours: even in brightness, so they also work in grey and for colour-blind readers
    [
        *((0, 0, 4), (23, 11, 59), (66, 10, 104), (107, 23, 110), (147, 38, 103), (187, 55, 85)),
        *((221, 81, 58), (243, 119, 26), (252, 165, 10), (246, 214, 68), (252, 255, 164)),
    ]
)
HEAT_SHARE = 0.6  # opacity of the colours over the image


class DomainImages:
    """The images of a domain as the model sees them: resized to a square, its centre cropped. Files that are missing
    now are counted and give None."""

    def __init__(self, root: Path, paths: tuple[str, ...], *, resize: int, crop: int) -> None:
        self.root, self.paths, self.resize, self.crop = root, paths, resize, crop
        self.pixels: dict[int, np.ndarray | None] = {}  # index -> uint8 [crop, crop, 3], None if unreadable

    def fetch(self, indices: Iterable[int]) -> list[np.ndarray | None]:
        """The pixels of these images, decoded in parallel."""
        wanted = list(indices)
        new = [i for i in dict.fromkeys(wanted) if i not in self.pixels]
        edge = round((self.resize - self.crop) / 2)
        centre = slice(edge, edge + self.crop)
        decoded = decode_in_order((self.root / self.paths[i] for i in new), self.resize, np.asarray)
        for i, pixels in zip(new, decoded, strict=True):
            self.pixels[i] = None if isinstance(pixels, UnreadableImage) else pixels[centre, centre]
        return [self.pixels[i] for i in wanted]

    def thumbnails(self, indices: Iterable[int]) -> list[str | None]:
        return in_parallel(lambda pixels: None if pixels is None else jpeg(enlarged(pixels)), self.fetch(indices))

    @property
    def missing(self) -> int:
        return sum(pixels is None for pixels in self.pixels.values())


def run_images(record: RunRecord) -> tuple[DomainImages, DomainImages]:
    """The run's source and target images."""
    config, paths = record.config, record.images.paths
    size = {"resize": config.resize, "crop": config.crop}
    source = DomainImages(record.root("source"), paths["source"], **size)
    return source, DomainImages(record.root("target"), paths["target"], **size)


def in_parallel(make: Callable[..., str | None], *columns: Iterable[Any]) -> list[str | None]:
    """Data URLs, made in threads: PIL releases the GIL while it resizes and compresses."""
    with ThreadPoolExecutor(processor_count()) as pool:
        return list(pool.map(make, *columns))


def enlarged(pixels: np.ndarray) -> Image.Image:
    return Image.fromarray(pixels).resize((THUMBNAIL_SIDE, THUMBNAIL_SIDE), Image.Resampling.BICUBIC)


def heated(pixels: np.ndarray, weights: np.ndarray) -> Image.Image:
    """The image in grey with its patches' weights as colours, [rows, columns], scaled from smallest to largest."""
    low, high = float(weights.min()), float(weights.max())
    scaled = (weights.astype(np.float32) - low) / max(high - low, 1e-12)
    smooth = np.asarray(
        Image.fromarray(scaled).resize((THUMBNAIL_SIDE, THUMBNAIL_SIDE), Image.Resampling.BILINEAR)
    )  # [THUMBNAIL_SIDE, THUMBNAIL_SIDE]
    colours = np.stack([np.interp(smooth, np.linspace(0, 1, len(INFERNO)), hue) for hue in INFERNO.T], axis=-1)
    grey = np.asarray(enlarged(pixels).convert("L"), dtype=np.float64)[..., None]
    return Image.fromarray(np.rint(HEAT_SHARE * colours + (1 - HEAT_SHARE) * grey).astype(np.uint8))


def jpeg(image: Image.Image) -> str:
    """The image as a data URL."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"
