"""`predict` at scale: files and tars, CSV and Parquet; what it costs beside the model, its peak memory, and how busy
a GPU is.

usage: python benchmarks/predict.py [--model NAME] [--images N] [--free N] [--busy NAME ...] [--json F]
The images are made up: 400 JPEGs, linked or copied. Every row is measured in a process of its own, without its start.
--busy measures nothing but these models on files: the larger the model, the less it waits for decoding.
"""

import argparse
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from decode import make_images
from pipeline import watched_gpu

import measure
from cdtrans.config import Resolved
from cdtrans.inputs.stream import ImageSource
from cdtrans.network.weights import build_model, make_card
from cdtrans.runtime.device import pick_precision
from cdtrans.runtime.screen import Screen
from cdtrans.serving.classifier import Prediction, load
from cdtrans.serving.portable import timm_file
from cdtrans.serving.predict import PredictionJob

TARS = 8


def main() -> None:
    parser = measure.parser(__doc__ or "")
    gpu = torch.cuda.is_available()
    parser.add_argument("--model", default="deit_small_patch16_224" if gpu else "test_vit.r160_in1k")
    parser.add_argument("--busy", nargs="+", metavar="NAME")
    parser.add_argument("--images", type=int, default=262_144 if gpu else 32_768)
    parser.add_argument("--free", type=int, default=1_000_000, help="images for a model that costs nothing")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as place:
        here = Path(place)
        few, many, tars, listed = write_images(here, arguments.images, arguments.free)
        plan = [("files, CSV", name, many, "csv", False) for name in arguments.busy or ()] or [
            (what, arguments.model, images, kind, free)
            for what, images, kind, free in (
                ("files, CSV", few, "csv", False),
                ("files, CSV", many, "csv", False),
                ("files, Parquet", many, "parquet", False),
                ("tars, CSV", tars, "csv", False),
                ("tars, Parquet", tars, "parquet", False),
                ("list, CSV, no model", listed, "csv", True),
                ("list, Parquet, no model", listed, "parquet", True),
            )
        ]
        for what, name, images, kind, free in plan:
            write_model(here, name, arguments.device)
            numbers = measured(here, images, kind, free, arguments)
            rows.append({"what": what, "model": name, **numbers})
            print(rows[-1], flush=True)
    measure.report("predict", rows, arguments)


def write_model(here: Path, name: str, device: str) -> None:
    """An exported model with random weights."""
    crop = 224 if device == "cuda" else 160
    precision = pick_precision("auto", torch.device(device))
    config = Resolved(backbone=name, precision=precision, crop=crop, resize=crop * 8 // 7)  # type: ignore[arg-type]
    card = make_card(config, tuple("abcde"), stage="adaptation", epoch=1)
    (here / "model.safetensors").write_bytes(timm_file(build_model(card), card))


def write_images(here: Path, count: int, free: int) -> tuple[Path, Path, Path, Path]:
    """A folder with few images, one with `count`, tars with as many, and a list of `free`."""
    (here / "made").mkdir()
    made = sorted(make_images(here / "made").iterdir())
    for name, number in (("few", 2048), ("many", count)):
        for n, file in enumerate(islice(cycle(made), number)):
            folder = here / name / f"{n // 1000:04}"
            folder.mkdir(parents=True, exist_ok=True)
            os.link(file, folder / f"{n:08}.jpg")
    (here / "tars").mkdir()
    contents = cycle([file.read_bytes() for file in made])
    for n in range(TARS):
        with tarfile.open(here / "tars" / f"{n:03}.tar", "w") as tar:
            for k, content in enumerate(islice(contents, count // TARS)):
                member = tarfile.TarInfo(f"{k:08}.jpg")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    (here / "list.txt").write_text("".join(f"made/{file.name}\n" for file in islice(cycle(made), free)))
    return here / "few", here / "many", here / "tars", here / "list.txt"


def measured(here: Path, images: Path, kind: str, free: bool, arguments: argparse.Namespace) -> dict[str, Any]:
    work = [
        here / "model.safetensors",
        images,
        here / f"out.{kind}",
        kind,
        arguments.device,
        "free" if free else "model",
    ]
    busy: list[tuple[float, int]] = []
    with watched_gpu(busy) if arguments.device == "cuda" else nullcontext():
        done = subprocess.run(
            [sys.executable, __file__, "--child", *map(str, work)],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    told: dict[str, Any] = json.loads(done.stdout)
    start, end = told.pop("start"), told.pop("end")
    told |= {
        "s": end - start,
        "images/s": told["images"] / (end - start),
        "us/image": 1e6 * (end - start) / told["images"],
    }
    if shares := [share for when, share in busy if start < when <= end]:
        told["% GPU busy"] = sum(shares) / len(shares)
    return told


def child(model: str, images: str, out: str, kind: str, device: str, how: str) -> None:
    """One measurement."""
    classifier = load(model, device=device)
    if how == "free":
        classifier.stream_batches = free_of_cost  # type: ignore[method-assign,assignment]
    job = PredictionJob(classifier, Path(images), None, kind, 1, 0.0, 0.0, Screen(quiet=True, machine=True))
    start, before = time.time(), time.process_time()
    result = job.run(Path(out))
    end, cpu = time.time(), time.process_time() - before
    status = Path("/proc/self/status").read_text()
    peak = re.search(r"VmHWM:\s*(\d+) kB", status)
    megabytes = int(peak[1]) / 1024 if peak else float("nan")
    told = {"images": result.images, "start": start, "end": end}
    print(json.dumps(told | {"CPU s": cpu, "peak MB": megabytes}))


def free_of_cost(batches: Iterable[Sequence[ImageSource]], **_: Any) -> Iterator[Prediction]:
    """In place of a model and of decoding."""
    for batch in batches:
        for path in batch:
            assert isinstance(path, Path)
            yield Prediction(path, "a", 0.987654, (("a", 0.987654),))


if __name__ == "__main__":
    if "--child" in sys.argv:
        child(*sys.argv[2:])
    else:
        main()
