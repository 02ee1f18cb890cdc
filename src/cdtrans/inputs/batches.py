"""Indices -> batches of normalised images, cropped and mirrored on the device that will use them."""

import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cdtrans.inputs.stream import StreamedPixels
from cdtrans.runtime.ranks import share

BATCHES_AHEAD = 2  # prepared while a step runs, if the images are not on the device
RESIDENT_SHARE = 0.4  # of the GPU's free memory for decoded images; larger sets stay in host memory


@dataclass(frozen=True)
class Augmentation:
    """One random crop and flip per image, drawn for a whole epoch at once so that no step waits for it."""

    top: Tensor  # [N]
    left: Tensor  # [N]
    flip: Tensor  # [N] bool

    def __getitem__(self, where: slice) -> "Augmentation":
        return Augmentation(self.top[where], self.left[where], self.flip[where])


class Images:
    """The images of one domain; turns indices into model input."""

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

    def draw(self, count: int, flip: float, generator: torch.Generator) -> Augmentation:
        """Crops and flips with the distribution of RandomCrop and RandomHorizontalFlip."""
        offsets = self.resize - self.crop + 1
        top = torch.randint(offsets, (count,), generator=generator)
        left = torch.randint(offsets, (count,), generator=generator)
        mirrored = torch.rand(count, generator=generator) < flip
        return Augmentation(top.to(self.home), left.to(self.home), mirrored.to(self.home))

    def plan(self, indices: Tensor, batches: list[slice], flip: float, generator: torch.Generator) -> "Plan":
        """An epoch: these images in this order and these batches, each with its own crop and flip."""
        return Plan(self, indices.to(self.home), batches, self.draw(len(indices), flip, generator))

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
        return normalised(cut.to(self.device, non_blocking=True), self.mean, self.std)

    def _fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """An array of pixels, and the row of each image in it."""
        if isinstance(self.pixels, StreamedPixels):
            decoded = self.pixels.fetch(self.rows[indices].tolist())
            return torch.from_numpy(decoded), torch.arange(len(decoded))
        return self.pixels, self.rows[indices]


def normalised(cut: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """uint8 [B, crop, crop, 3] -> [B, 3, crop, crop] input; mean and std are [1, 3, 1, 1]."""
    return cut.permute(0, 3, 1, 2).float().div_(255).sub_(mean).div_(std)


class Plan:
    """The batches of an epoch; `plan[step]` is the step's input, [B, 3, crop, crop]. If the images are not on the
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
        return self.images.augmented(self.indices[batch], self.augmentation[batch])


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
