"""Indices -> batches of normalised images, cropped and mirrored on the device that will use them."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cdtrans.ranks import share

RESIDENT_SHARE = 0.4  # of the GPU's free memory that decoded images may take; beyond it they stay in host memory


@dataclass(frozen=True)
class Augmentation:
    """One random crop and flip per image, drawn for a whole epoch at once so that a step waits for nothing."""

    top: Tensor  # [N]
    left: Tensor  # [N]
    flip: Tensor  # [N] bool

    def __getitem__(self, where: slice) -> "Augmentation":
        return Augmentation(self.top[where], self.left[where], self.flip[where])


class Images:
    """The decoded images of one domain and the way from indices to model input."""

    def __init__(
        self,
        pixels: np.ndarray,  # uint8 [rows, resize, resize, 3]
        rows: np.ndarray,  # [N] the row of each image of the domain
        *,
        crop: int,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        device: torch.device,
    ) -> None:
        self.crop, self.device = crop, device
        self.resize = pixels.shape[1]
        with warnings.catch_warnings():  # torch warns of a read-only map, and nobody here writes to it
            warnings.simplefilter("ignore", UserWarning)
            self.pixels = _resident(torch.from_numpy(np.asarray(pixels)), device)
        self.rows = torch.from_numpy(rows).to(self.pixels.device)
        self.mean = torch.tensor(mean, device=device).view(1, 3, 1, 1)
        self.std = torch.tensor(std, device=device).view(1, 3, 1, 1)

    def __len__(self) -> int:
        return len(self.rows)

    def draw(self, count: int, flip: float, generator: torch.Generator) -> Augmentation:
        """Crops and flips with the distribution of RandomCrop and RandomHorizontalFlip."""
        room = self.resize - self.crop + 1
        top = torch.randint(room, (count,), generator=generator)
        left = torch.randint(room, (count,), generator=generator)
        mirrored = torch.rand(count, generator=generator) < flip
        where = self.pixels.device
        return Augmentation(top.to(where), left.to(where), mirrored.to(where))

    def augmented(self, indices: Tensor, augmentation: Augmentation) -> Tensor:
        """[B] indices -> [B, 3, crop, crop] training input."""
        return self._cut(indices, augmentation)

    def centred(self, indices: Tensor) -> Tensor:
        """[B] indices -> [B, 3, crop, crop] test input: the centre crop."""
        middle = torch.full_like(indices, round((self.resize - self.crop) / 2))
        return self._cut(indices, Augmentation(middle, middle, torch.zeros_like(indices, dtype=torch.bool)))

    def in_order(self, batch: int) -> Iterator[Tensor]:
        """The domain's test input, or this rank's share of it, batch by batch."""
        for indices in torch.arange(len(self), device=self.rows.device)[share(len(self))].split(batch):
            yield self.centred(indices)

    def _cut(self, indices: Tensor, a: Augmentation) -> Tensor:
        span = torch.arange(self.crop, device=self.pixels.device)
        across = torch.where(a.flip[:, None], self.crop - 1 - span, span)  # [B, crop]
        row = self.rows[indices][:, None, None]
        cut = self.pixels[row, (a.top[:, None] + span)[:, :, None], (a.left[:, None] + across)[:, None, :]]
        images = cut.to(self.device, non_blocking=True).permute(0, 3, 1, 2).float()  # [B, 3, crop, crop]
        return images.div_(255).sub_(self.mean).div_(self.std)


def _resident(pixels: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda" and pixels.nbytes < RESIDENT_SHARE * torch.cuda.mem_get_info(device)[0]:
        return pixels.to(device)
    return pixels
