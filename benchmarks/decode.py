"""Decoding a folder of images into the store: cold (everything is decoded) and warm (everything is there).

usage: python benchmarks/decode.py [--images FOLDER] [--json FILE]    (without a folder, JPEGs are made up)"""

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import measure
from cdtrans.inputs.pixels import open_pixels
from cdtrans.inputs.scan import scan_unlabelled
from cdtrans.runtime.screen import Screen

MADE_UP = 400


def make_images(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    for n in range(MADE_UP):
        coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        coarse.resize((341, 256), Image.Resampling.BICUBIC).save(folder / f"{n:04}.jpg", quality=90)
    return folder


def opened(folder: Path, size: int, cache: Path, name: str) -> dict[str, Any]:
    domain = scan_unlabelled(folder)
    start = time.perf_counter()
    open_pixels(domain.files(), root=domain.root, size=size, cache=cache, screen=Screen(quiet=True), name="target")
    seconds = time.perf_counter() - start
    return {"store": name, "images": len(domain), "s": seconds, "images/s": len(domain) / seconds}


def main() -> None:
    parser = measure.parser(__doc__ or "")
    parser.add_argument("--images", type=Path)
    parser.add_argument("--size", type=int, default=256)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = arguments.images or make_images(Path(place))
        cache = Path(place) / ".cache"
        rows = [opened(folder, arguments.size, cache, name) for name in ("cold", "warm")]
    measure.report(f"decoding on {len(os.sched_getaffinity(0))} cores", rows, arguments)


if __name__ == "__main__":
    main()
