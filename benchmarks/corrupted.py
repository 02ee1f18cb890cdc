"""Tasks of another kind than between data sets: the same kind of images, but corrupted. docs/results/guard.md.

    python benchmarks/corrupted.py DOMAIN ... --out DIR [--each 32]

A DOMAIN holds class folders. Every second image of a class goes to DIR/NAME_clean, a source; the others go to
DIR/NAME_blur, DIR/NAME_noise and so on, once for each corruption: targets with none of the source's images."""

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

SIDE = 256  # pixels
FEW = 28  # pixels that 'pixels' leaves
DRAWN = np.random.default_rng(0)


def noise(image: Image.Image) -> Image.Image:
    pixels = np.asarray(image, dtype=float) + DRAWN.normal(0, 60, (SIDE, SIDE, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def dark(image: Image.Image) -> Image.Image:
    return ImageEnhance.Contrast(ImageEnhance.Brightness(image).enhance(0.25)).enhance(0.6)


def pixels(image: Image.Image) -> Image.Image:
    return image.resize((FEW, FEW), Image.Resampling.BOX).resize((SIDE, SIDE), Image.Resampling.NEAREST)


def edges(image: Image.Image) -> Image.Image:
    return ImageOps.invert(image.convert("L").filter(ImageFilter.FIND_EDGES)).convert("RGB")


CORRUPTIONS: dict[str, Callable[[Image.Image], Image.Image]] = {
    "blur": lambda image: image.filter(ImageFilter.GaussianBlur(5)),
    "noise": noise,
    "dark": dark,
    "pixels": pixels,
    "edges": edges,
    "negative": ImageOps.invert,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("domains", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--each", type=int, help="take no more images of a class")
    arguments = parser.parse_args()
    for domain in arguments.domains:
        for folder in sorted(path for path in domain.iterdir() if path.is_dir()):
            for n, file in enumerate(sorted(folder.iterdir())[: arguments.each]):
                image = Image.open(file).convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR)
                made = {k: change(image) for k, change in CORRUPTIONS.items()} if n % 2 else {"clean": image}
                for kind, changed in made.items():
                    place = arguments.out / f"{domain.name}_{kind}" / folder.name
                    place.mkdir(parents=True, exist_ok=True)
                    changed.save(place / f"{file.stem}.jpg", quality=90)


if __name__ == "__main__":
    main()
