"""Indices -> batches of normalised images, cropped and mirrored on the device that will use them."""

import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from cdtrans.inputs.stream import StreamedPixels
from cdtrans.runtime.ranks import random_rows, share

BATCHES_AHEAD = 2  # prepared while a step runs, if the images are not on the device
RESIDENT_SHARE = 0.4  # largest share of the GPU's free memory for decoded images; larger sets stay in host memory

# Strong augmentation
SMALLEST_AREA = 0.5  # smallest share of the image in a crop
ASPECT = 4 / 3  # largest ratio of a crop's sides
COLOUR = 0.4  # contrast and saturation are multiplied by 1 - COLOUR to 1 + COLOUR
BRIGHTNESS = 0.6  # largest change, in standard deviations of ImageNet's pixels
GREY = 0.1  # probability that an image loses its colours
GREY_WEIGHTS = (0.299, 0.587, 0.114)
MASKED, MASK_SQUARES = 0.3, 7  # share of masked squares, and squares per side


class Augmentation(NamedTuple):
    """One random crop and flip per image, drawn for a whole epoch at once so that no step waits for it."""

    top: Tensor  # [N]
    left: Tensor  # [N]
    flip: Tensor  # [N] bool


class Images:
    """The images of one domain, as model input by index."""

    def __init__(
        self,
        pixels: np.ndarray | StreamedPixels,  # uint8 [rows, resize, resize, 3], in memory or decoded at every access
        rows: np.ndarray,  # [N] the row of each image of the domain
        *,
        crop: int,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        device: torch.device,
    ) -> None:
        self.crop, self.device = crop, device
        self.pixels = pixels if isinstance(pixels, StreamedPixels) else _resident(pixels, device)
        self.home = torch.device("cpu") if isinstance(self.pixels, StreamedPixels) else self.pixels.device
        self.resize = self.pixels.size if isinstance(self.pixels, StreamedPixels) else self.pixels.shape[1]
        self.rows = torch.from_numpy(rows).to(self.home)
        self.mean = torch.tensor(mean, device=device).view(1, 3, 1, 1)
        self.std = torch.tensor(std, device=device).view(1, 3, 1, 1)

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, rows: np.ndarray) -> "Images":
        """Another selection of the same pixels, which are not copied."""
        others = copy(self)
        others.rows = torch.from_numpy(rows).to(self.home)
        return others

    def part(self, indices: Tensor) -> "Images":
        """Some of these images."""
        return self.select(self.rows[indices.to(self.home)].cpu().numpy())

    def draw(self, count: int, flip: float, generator: torch.Generator) -> Augmentation:
        """Crops and flips with the distribution of RandomCrop and RandomHorizontalFlip."""
        offsets = self.resize - self.crop + 1
        top = torch.randint(offsets, (count,), generator=generator)
        left = torch.randint(offsets, (count,), generator=generator)
        mirrored = torch.rand(count, generator=generator) < flip
        return Augmentation(top.to(self.home), left.to(self.home), mirrored.to(self.home))

    def plan(self, indices: Tensor, batches: list[slice], flip: float, generator: torch.Generator) -> "EpochBatches":
        """An epoch: these images in this order and these batches, each with its own crop and flip."""
        return EpochBatches(self, indices.to(self.home), batches, self.draw(len(indices), flip, generator))

    def none(self) -> Tensor:
        """A batch of no images, [0, 3, crop, crop]."""
        return torch.zeros(0, 3, self.crop, self.crop, device=self.device)

    def centred(self, indices: Tensor) -> Tensor:
        """[B] indices -> [B, 3, crop, crop] test input: the centre crop."""
        middle = torch.full_like(indices, round((self.resize - self.crop) / 2))
        return self.augmented(indices, Augmentation(middle, middle, torch.zeros_like(indices, dtype=torch.bool)))

    def in_order(self, batch: int) -> Iterator[Tensor]:
        """The domain's test input, or this rank's share of it, batch by batch."""
        for indices in torch.arange(len(self), device=self.home)[share(len(self))].split(batch):
            yield self.centred(indices)

    def augmented(self, indices: Tensor, a: Augmentation) -> Tensor:
        """[B] indices -> [B, 3, crop, crop] input, cropped and mirrored as in `a`."""
        span = torch.arange(self.crop, device=self.home)
        across = torch.where(a.flip[:, None], self.crop - 1 - span, span)  # [B, crop]
        pixels, row = self._fetch(indices)
        cut = pixels[row[:, None, None], (a.top[:, None] + span)[:, :, None], (a.left[:, None] + across)[:, None, :]]
        return model_input(cut.to(self.device, non_blocking=True), self.mean, self.std)

    def _fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """An array of pixels, and the row of each image in it."""
        if isinstance(self.pixels, StreamedPixels):
            decoded = self.pixels.fetch(self.rows[indices].tolist())
            return torch.from_numpy(decoded), torch.arange(len(decoded))
        return self.pixels, self.rows[indices]


def model_input(cut: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """uint8 [B, crop, crop, 3] -> [B, 3, crop, crop] input; mean and std are [1, 3, 1, 1]."""
    return cut.permute(0, 3, 1, 2).float().div_(255).sub_(mean).div_(std)


class EpochBatches:
    """`batches[step]` is the input of a step, [B, 3, crop, crop]. If the images are not on the
    device that computes, a thread prepares the next batches."""

    def __init__(self, images: Images, indices: Tensor, batches: list[slice], augmentation: Augmentation) -> None:
        self.images, self.indices, self.batches, self.augmentation = images, indices, batches, augmentation
        elsewhere = images.home != images.device or isinstance(images.pixels, StreamedPixels)
        self.thread = ThreadPoolExecutor(1) if elsewhere else None
        self.coming: dict[int, Future[Tensor]] = {}

    def __getitem__(self, step: int) -> Tensor:
        if self.thread is None:
            return self._make(step)
        for n in range(step, min(step + 1 + BATCHES_AHEAD, len(self.batches))):
            if n not in self.coming:
                self.coming[n] = self.thread.submit(self._make, n)
        return self.coming.pop(step).result()

    def _make(self, step: int) -> Tensor:
        batch = self.batches[step]
        own = Augmentation(*(column[batch] for column in self.augmentation))
        return self.images.augmented(self.indices[batch], own)


def _resident(pixels: np.ndarray, device: torch.device) -> Tensor:
    """The pixels on the GPU, if they fit."""
    with warnings.catch_warnings():  # torch warns about read-only arrays; nothing here writes to them
        warnings.simplefilter("ignore", UserWarning)
        tensor = torch.from_numpy(np.asarray(pixels))
    if device.type == "cuda" and tensor.nbytes < RESIDENT_SHARE * torch.cuda.mem_get_info(device)[0]:
        return tensor.to(device)
    return tensor


class LabelledImages(NamedTuple):
    """Source images with their labels."""

    images: Images
    labels: Tensor  # [N]


def strong(x: Tensor) -> Tensor:
    """A random resized crop, brightness, contrast, saturation, and some images in grey: [B, 3, H, W] -> the same. The
    images have been cropped, mirrored and normalised; none is mirrored here, so `--flip 0` is respected."""
    r = random_rows(x, 8)  # [B, 8]
    area = SMALLEST_AREA + (1 - SMALLEST_AREA) * r[:, 0]
    stretch = ASPECT ** (r[:, 1] - 0.5)  # the width is multiplied by it, the height divided
    width, height = ((area.sqrt() * side).clamp(max=1) for side in (stretch, 1 / stretch))
    zero = torch.zeros_like(width)
    across = torch.stack([width, zero, (2 * r[:, 2] - 1) * (1 - width)], dim=1)
    down = torch.stack([zero, height, (2 * r[:, 3] - 1) * (1 - height)], dim=1)
    with torch.autocast(x.device.type, enabled=False):  # 16 bits would be off by a pixel
        grid = F.affine_grid(torch.stack([across, down], dim=1), list(x.shape), align_corners=False)
        x = F.grid_sample(x, grid, padding_mode="reflection", align_corners=False)
    contrast, brightness, saturation = (r[:, n, None, None, None] * 2 - 1 for n in (4, 5, 6))  # from -1 to 1
    mean = x.mean(dim=(1, 2, 3), keepdim=True)
    x = mean + (x - mean) * (1 + COLOUR * contrast) + BRIGHTNESS * brightness
    grey = sum(weight * x[:, n : n + 1] for n, weight in enumerate(GREY_WEIGHTS))
    colours = torch.where(r[:, 7, None, None, None] < GREY, 0.0, 1 + COLOUR * saturation)
    return grey + (x - grey) * colours


def masked(x: Tensor, share: float = MASKED, squares: int = MASK_SQUARES) -> Tensor:
    """About this share of each image's squares set to zero, the mean of all pixels."""
    kept = (random_rows(x, squares * squares) >= share).to(x.dtype).view(-1, 1, squares, squares)
    return x * F.interpolate(kept, size=x.shape[2:])
