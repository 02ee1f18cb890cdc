"""`predict` from plain files: decoding in parallel, batches on the device.

usage: python benchmarks/predict.py [--model NAME] [--images FOLDER] [--json FILE]
Without a folder, JPEGs are made up."""

import tempfile
import time
from pathlib import Path
from typing import Any

import measure
import torch
from decode import make_images

from cdtrans.config import make_config
from cdtrans.data.domains import stream_images
from cdtrans.model.card import build_model, make_card
from cdtrans.runtime.device import pick_precision
from cdtrans.serving.classifier import Classifier


def predict(classifier: Classifier, folder: Path, name: str) -> dict[str, Any]:
    start = time.perf_counter()
    images = sum(1 for _ in classifier.stream(stream_images(folder)))
    seconds = time.perf_counter() - start
    return {"model": name, "images": images, "s": seconds, "images/s": images / seconds}


def main() -> None:
    parser = measure.parser(__doc__ or "")
    gpu = torch.cuda.is_available()
    parser.add_argument("--model", default="deit_small_patch16_224" if gpu else "test_vit.r160_in1k")
    parser.add_argument("--images", type=Path)
    arguments = parser.parse_args()
    sizes = {"crop": 224, "resize": 256} if gpu else {"crop": 160, "resize": 182}
    precision = pick_precision("auto", torch.device(arguments.device))
    config = make_config({"backbone": arguments.model, "precision": precision, **sizes})
    card = make_card(config, tuple("abcde"), stage="adaptation", epoch=1)
    classifier = Classifier(build_model(card), card, torch.device(arguments.device))
    with tempfile.TemporaryDirectory() as place:
        folder = arguments.images or make_images(Path(place))
        predict(classifier, folder, arguments.model)
        rows = [predict(classifier, folder, arguments.model) for _ in range(arguments.repeats or 3)]
    rows.sort(key=lambda row: row["s"])
    middle = rows[len(rows) // 2]
    measure.report("predict", [middle | {"s least": rows[0]["s"], "s most": rows[-1]["s"]}], arguments)


if __name__ == "__main__":
    main()
