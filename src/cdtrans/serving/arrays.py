"""Images as programs have them: paths, PIL images, arrays and tensors, one or many -> paths and PIL images one by one.

Arrays are refused where their meaning would be a guess. That channels come in the order red, green, blue is taken for
granted: it cannot be seen."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Union

import numpy as np
from PIL import Image

from cdtrans.errors import ArgumentTypeError, DataError
from cdtrans.inputs.scan import stream_images
from cdtrans.inputs.stream import ImageSource

if TYPE_CHECKING:
    import torch

CHANNELS = (1, 3, 4)  # grey, RGB, RGBA
OVERSHOOT = 1e-3  # interpolation may leave the range from 0 to 1 by so much

One = Union[str, Path, Image.Image, np.ndarray, "torch.Tensor"]


def each_image(images: One | Iterable[One]) -> Iterator[ImageSource]:
    """A folder, list or tar gives its images, a batch of arrays one image after the other."""
    if isinstance(images, str | Path):
        yield from stream_images(Path(images))
        return
    if (array := as_array(images)) is not None:
        several = array.dtype.kind in "OU"  # an array of paths
    else:
        several = isinstance(images, Iterable) and not isinstance(images, bytes | dict | Image.Image)
    for number, image in enumerate(images if several else [images], start=1):  # type: ignore[arg-type]
        yield from _one(image, f"Image {number}" if several else "The image", batch=not several)


def _one(image: object, name: str, *, batch: bool) -> Iterator[ImageSource]:
    """One image, or the images of a batch. `name` is for errors."""
    if isinstance(image, str | Path):
        yield image
    elif isinstance(image, Image.Image):
        if 0 in image.size:  # PIL would make it black
            size = f"{image.width} x {image.height}"
            raise DataError("image-shape", f"{name} has no pixels: its size is {size}; leave it out.")
        yield image
    elif (array := as_array(image)) is None:
        kinds = (
            f"a path, a PIL image, a numpy array or a torch tensor, not a value of the type '{type(image).__name__}'"
        )
        raise ArgumentTypeError("image-type", f"{name} must be {kinds}.")
    elif array.ndim == 4 and not batch:
        raise DataError("image-shape", f"{name} is a batch {array.shape}; give one batch, or images one by one.")
    else:
        yield from array_images(array, name)


def as_array(image: object) -> np.ndarray | None:
    """A numpy array or torch tensor as an array; None if it is neither."""
    if isinstance(image, np.ndarray):
        return image
    import torch  # a model has been loaded

    if not isinstance(image, torch.Tensor):
        return None
    image = image.detach().cpu()
    return np.asarray((image.float() if image.is_floating_point() else image).numpy())


def array_images(array: np.ndarray, name: str) -> Iterator[Image.Image]:
    """[H, W], [H, W, C] or [C, H, W], or a batch [N, H, W, C] or [N, C, H, W] -> PIL images. Three axes are always
    one image, so that [3, H, W] is RGB and no batch of grey images."""
    if array.ndim not in (2, 3, 4) or 0 in array.shape[-3:]:
        raise DataError("image-shape", f"{name} has the shape {array.shape}; give [H, W, C], [C, H, W] or a batch.")
    if array.ndim > 2:
        array = channels_last(array, name)
    for image in array if array.ndim == 4 else array[None]:
        pixels = eight_bits(image, name)
        yield Image.fromarray(pixels[..., 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels)


def channels_last(array: np.ndarray, name: str) -> np.ndarray:
    """The channels are where there are 1, 3 or 4 of them."""
    last, first = array.shape[-1] in CHANNELS, array.shape[-3] in CHANNELS
    if last != first:
        return array if last else np.moveaxis(array, -3, -1)
    if last:
        why = "may have its channels first or last; give a larger image, or a PIL image"
    else:
        batch = "; give a batch of grey images as [N, H, W, 1]" if array.ndim == 3 else ""
        why = f"has its channels neither last nor first: there must be 1 (grey), 3 (RGB) or 4 (RGBA) of them{batch}"
    raise DataError("image-shape", f"{name} of shape {array.shape} {why}.")


def eight_bits(image: np.ndarray, name: str) -> np.ndarray:
    """uint8 as it is, floats from 0 to 1 times 255."""
    if image.dtype == np.uint8:
        return np.ascontiguousarray(image)
    if image.dtype.kind != "f":
        advice = "if they are from 0 to 255, use .astype('uint8') or .to(torch.uint8)"
        raise DataError("pixel-type", f"{name} must be uint8, or float from 0 to 1, not {image.dtype}; {advice}.")
    if not np.isfinite(image).all():
        raise DataError("pixel-range", f"{name} has values that are NaN or infinite; replace them.")
    low, high = float(image.min()), float(image.max())
    if low < -OVERSHOOT or high > 1 + OVERSHOOT:
        advice = "divide by 255" if low >= 0 and high <= 255 else "give the pixels before any normalisation"
        raise DataError("pixel-range", f"{name} has floats from {low:.4g} to {high:.4g}, not 0 to 1; {advice}.")
    return np.asarray(np.rint(255 * image.clip(0, 1)).astype(np.uint8))
