"""Strong augmentation of training images on the device that holds them, for a whole batch at once.

It is applied to images that have been cropped, mirrored and normalised already. It does not mirror images itself, so
`--flip 0` is respected."""

import torch
from torch import Tensor
from torch.nn import functional as F

from cdtrans.runtime.ranks import random_rows

SMALLEST_AREA = 0.5  # of the image, that a crop keeps
ASPECT = 4 / 3  # of its sides, at most
COLOUR = 0.4  # contrast and saturation are multiplied by 1 - COLOUR to 1 + COLOUR
BRIGHTNESS = 0.6  # at most, in deviations of ImageNet's pixels
GREY = 0.1  # the chance of an image without colours
GREY_WEIGHTS = (0.299, 0.587, 0.114)
MASKED, SQUARES = 0.3, 7  # the share of masked squares, and how many are in a row, by default


def strong(x: Tensor) -> Tensor:
    """A random resized crop, brightness, contrast, saturation, and some images in grey: [B, 3, H, W] -> the same."""
    r = random_rows(x, 8)  # [B, 8]
    area = SMALLEST_AREA + (1 - SMALLEST_AREA) * r[:, 0]
    stretch = ASPECT ** (r[:, 1] - 0.5)  # of the width; the height is divided by it
    width, height = ((area.sqrt() * side).clamp(max=1) for side in (stretch, 1 / stretch))
    zero = torch.zeros_like(width)
    across = torch.stack([width, zero, (2 * r[:, 2] - 1) * (1 - width)], dim=1)
    down = torch.stack([zero, height, (2 * r[:, 3] - 1) * (1 - height)], dim=1)
    with torch.autocast(x.device.type, enabled=False):  # in 16 bits a place is off by a pixel
        grid = F.affine_grid(torch.stack([across, down], dim=1), list(x.shape), align_corners=False)
        x = F.grid_sample(x, grid, padding_mode="reflection", align_corners=False)
    contrast, brightness, saturation = (r[:, n, None, None, None] * 2 - 1 for n in (4, 5, 6))  # from -1 to 1
    mean = x.mean(dim=(1, 2, 3), keepdim=True)
    x = mean + (x - mean) * (1 + COLOUR * contrast) + BRIGHTNESS * brightness
    grey = sum(weight * x[:, n : n + 1] for n, weight in enumerate(GREY_WEIGHTS))
    colours = torch.where(r[:, 7, None, None, None] < GREY, 0.0, 1 + COLOUR * saturation)
    return grey + (x - grey) * colours


def masked(x: Tensor, share: float = MASKED, squares: int = SQUARES) -> Tensor:
    """About this share of each image's squares set to zero, the mean of all pixels."""
    kept = (random_rows(x, squares * squares) >= share).to(x.dtype).view(-1, 1, squares, squares)
    return x * F.interpolate(kept, size=x.shape[2:])
