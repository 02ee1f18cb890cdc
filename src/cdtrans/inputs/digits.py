"""The built-in demo task, a small synthetic-to-real one: rendered digits (labelled) to handwriting (unlabelled).

Both domains come from the dependencies: the fonts in matplotlib and the scans in scikit-learn. Nothing is downloaded
and no system font is used, so the task is the same on every machine.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageFilter, ImageFont, ImageOps
from sklearn.datasets import load_digits

from cdtrans.record.files import atomic

IMAGE_SIDE = 32  # pixels of an image of either domain
BORDER = 0.1  # black border, as a share of IMAGE_SIDE: a random crop then shifts a digit and does not cut it
CANVAS = 3 * IMAGE_SIDE  # glyphs are deformed at this size and then reduced, which smooths their edges
GLYPH_POINTS = 96  # font size: a glyph is about as tall as its canvas, so it is hardly resampled
WARP_CELLS = 3  # per side of the mesh that bends a glyph
WARP = 0.06  # how far a mesh point may move, as a share of the canvas
HANDWRITING_MAX = 16  # scikit-learn's grey levels are 0..16
DONE = "digits.json"  # written last: a folder that holds it is complete

# Every text font of matplotlib; its other fonts have symbols or old-style figures instead of digits.
FONTS = (
    *(f"DejaVuSans{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSansMono{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSerif{style}" for style in ("", "-Bold", "-Italic", "-BoldItalic")),
    *(f"STIXGeneral{style}" for style in ("", "Bol", "Italic", "BolIta")),
    *("cmb10", "cmr10", "cmss10", "cmti10", "cmtt10"),
)
STAND_IN = "STIXGeneralItalic"  # where matplotlib lacks one of them


@dataclass(frozen=True)
class Digits:
    """The paths of the task: training reads `source` and `target`, only evaluation reads `answers`."""

    source: Path  # folders 0..9 of images
    target: Path  # one flat folder of images, in random order
    answers: Path  # the target labels: a list of 'path label', relative to its own folder


def write_digits(folder: Path, *, seed: int, images: int = 2000) -> Digits:
    """Write the task of this seed, unless it is complete already. The next call repairs an interrupted write."""
    digits = Digits(source=folder / "source", target=folder / "target", answers=folder / "answers.txt")
    made_from = json.dumps({"seed": seed, "images": images})
    done = folder / DONE
    if done.is_file() and done.read_text(encoding="utf-8") == made_from:
        return digits
    done.unlink(missing_ok=True)
    source_rng, target_rng = (np.random.default_rng([seed, domain]) for domain in range(2))
    _write_source(digits.source, images, source_rng)
    _write_target(digits, target_rng)
    with atomic(done) as file:
        file.write(made_from.encode())
    return digits


def _write_source(folder: Path, images: int, rng: np.random.Generator) -> None:
    """The digits are balanced to within one image."""
    for digit in range(10):
        _empty(folder / str(digit))
    for index in range(images):
        digit = index % 10
        _save(_deformed(_glyph(FONTS[rng.integers(len(FONTS))], digit), rng), folder / str(digit) / f"{index:04}.png")


def _write_target(digits: Digits, rng: np.random.Generator) -> None:
    """Shuffled, so that neither name nor order reveals the digit."""
    scans = load_digits()
    _empty(digits.target)
    lines = []
    for index, scan in enumerate(rng.permutation(len(scans.images))):
        path = digits.target / f"{index:04}.png"
        _save(_enlarged(scans.images[scan]), path)
        lines.append(f"{path.relative_to(digits.answers.parent).as_posix()} {scans.target[scan]}\n")
    digits.answers.write_text("".join(lines), encoding="utf-8")


def _enlarged(scan: np.ndarray) -> Image.Image:
    """An 8x8 scan as an image of the common size, white on black."""
    framed = np.pad(scan, 1)  # one of ten pixels: BORDER
    pixels = np.round(framed * (255 / HANDWRITING_MAX)).astype(np.uint8)
    return Image.fromarray(pixels).resize((IMAGE_SIDE, IMAGE_SIDE), Image.Resampling.BICUBIC)


@cache
def _glyph(font: str, digit: int) -> Image.Image:
    """A digit cut out along its ink, white on black."""
    fonts = Path(matplotlib.get_data_path(), "fonts", "ttf")
    path = fonts / f"{font}.ttf"
    if not path.exists():  # matplotlib before 3.11 has no cmti10
        path = fonts / f"{STAND_IN}.ttf"
    # The basic layout engine is in every Pillow; the other one depends on a system library.
    typeface = ImageFont.truetype(path, GLYPH_POINTS, layout_engine=ImageFont.Layout.BASIC)
    mask = typeface.getmask(str(digit), mode="L")
    drawn = Image.new("L", mask.size)
    drawn.im.paste(mask, (0, 0, *mask.size))
    return drawn.crop(drawn.getbbox())


def _deformed(glyph: Image.Image, rng: np.random.Generator) -> Image.Image:
    """A glyph varied like handwriting, in ranges that match the scans' mean height, width, ink and sharpness."""
    height = CANVAS * (1 - 2 * BORDER) * rng.uniform(0.8, 1.05)
    width = height * glyph.width / glyph.height * rng.uniform(0.65, 1.15)
    bent = _bent(glyph, (width, height), rng)
    growth = int(rng.integers(0, 4))  # pixels on each side
    thick = bent.filter(ImageFilter.MaxFilter(1 + 2 * growth)) if growth else bent  # size 1 crashes Pillow 12.3
    blurred = thick.filter(ImageFilter.GaussianBlur(rng.uniform(1, 5))).reduce(CANVAS // IMAGE_SIDE)
    return ImageOps.autocontrast(blurred)  # else thin strokes fade, while the scans use their whole grey scale


def _bent(glyph: Image.Image, size: tuple[float, float], rng: np.random.Generator) -> Image.Image:
    """The glyph at this size on a canvas, slanted, rotated, shifted and warped by a coarse mesh."""
    angle, slant = np.radians(rng.uniform(-15, 15)), rng.uniform(-0.3, 0.3)
    rotation = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    forward = rotation @ [[1, slant], [0, 1]] @ np.diag(np.divide(size, glyph.size))
    edges = np.linspace(0, CANVAS, WARP_CELLS + 1).astype(int)
    points = np.stack(np.meshgrid(edges, edges), axis=-1)  # [row, column, (x, y)]
    middle = CANVAS / 2 + rng.uniform(-0.06, 0.06, 2) * CANVAS
    shifts = rng.uniform(-WARP, WARP, points.shape) * CANVAS
    # Pillow needs the origin of each point of the result, so the deformation is inverted.
    origins = (points + shifts - middle) @ np.linalg.inv(forward).T + np.divide(glyph.size, 2)
    mesh = []
    for row, column in np.ndindex(WARP_CELLS, WARP_CELLS):
        box = (edges[column], edges[row], edges[column + 1], edges[row + 1])
        corners = origins[[row, row + 1, row + 1, row], [column, column, column + 1, column + 1]]
        mesh.append((box, corners.ravel()))
    return glyph.transform((CANVAS, CANVAS), Image.Transform.MESH, mesh, Image.Resampling.BILINEAR)


def _empty(folder: Path) -> None:
    """Make the folder and delete images of another seed or an interrupted write."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.png"):
        old.unlink()


def _save(image: Image.Image, path: Path) -> None:
    image.save(path, compress_level=0)  # not compressed, so that the bytes do not depend on the version of zlib
