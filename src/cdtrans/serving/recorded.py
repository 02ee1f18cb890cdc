"""What a run records of its own target images: the logits of the source-only and of the adapted model. Confidences and
predictions.csv are made from them and the model's temperature, and made anew when the temperature changes. Needs no
torch."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from cdtrans.errors import CdtransError
from cdtrans.record.card_file import RESTORE, read_card, set_temperature
from cdtrans.record.files import atomic, csv_line, intact
from cdtrans.record.run_folder import ANSWERS, PREDICTIONS, find_model, read_result
from cdtrans.record.shapes import Misfit, require
from cdtrans.serving.probabilities import calibrated, no_class, probabilities

LOGITS = "logits.npz"  # "source" and "adapted": [Nt, K], before the temperature, in the order of images.csv
VIEWS = "views.npz"


def confidences(run: Path, model: str = "chosen") -> np.ndarray:
    """[Nt] the calibrated probability of the predicted class of each target image."""
    return np.asarray(probabilities(target_logits(run, model)).max(axis=1))


def target_logits(run: Path, model: str = "chosen") -> np.ndarray:
    """[Nt, K], divided by the model's temperature."""
    name, _ = find_model(run, model)
    temperature = read_card(run / name)["temperature"]
    file = run / LOGITS
    if not file.exists():
        raise CdtransError(
            f"'{run}' has not recorded the logits of its target images ({LOGITS}), as newer runs do; run 'cdtrans "
            "adapt' again with another --out."
        )
    with intact(file, f"give another --model than '{name}', or {RESTORE}"), np.load(file) as arrays:
        logits = calibrated(arrays[name], temperature)
        if logits.ndim != 2 or not logits.size or not np.isfinite(logits).all():
            raise Misfit("its numbers are not logits")
    return logits


def calibrated_with(run: Path, model: str = "chosen") -> Literal["labels", "estimate", "nothing"]:
    """What the temperature of a finished run's model comes from: labels that `answer` has read, or the estimate, if
    there is one. The source-only model keeps its own, which does not depend on a target."""
    name, _ = find_model(run, model)
    if name == "source":
        return "nothing"
    file = run / ANSWERS
    if name == "adapted" and file.exists():
        with intact(file, "move it away and run the command again"):
            answers = json.loads(file.read_text(encoding="utf-8"))
            require(answers, {"calibrated": bool, "result": {"recalibrated": bool}})
            if answers.get("calibrated", answers.get("result", {}).get("recalibrated")):  # the last in older runs
                return "labels"
    result = read_result(run)
    estimate = result.get("estimates", {}).get("adapted") or result.get("estimate") or {}
    known = estimate.get("low") is not None and not estimate.get("harm")  # the last in older runs
    return "estimate" if known else "nothing"


def predictions_csv(paths: Sequence[str], classes: Sequence[str], logits: np.ndarray, source_only: np.ndarray) -> bytes:
    """predictions.csv: what the chosen model says of every target image, by path, from calibrated logits."""
    p = probabilities(logits)
    columns = zip(paths, p.argmax(axis=1), p.max(axis=1), no_class(source_only), strict=True)
    rows = sorted((path, classes[k], f"{sure:.6f}", f"{score:.6f}") for path, k, sure, score in columns)
    return b"".join(map(csv_line, [("path", "label", "probability", "no_class"), *rows]))


def predictions_of(run: Path, model: str = "chosen") -> bytes:
    """predictions.csv by a model of a finished run."""
    classes = read_card(run / "source").get("classes", [])
    paths, logits, source_only = target_paths(run), target_logits(run, model), target_logits(run, "source")
    with intact(run, RESTORE):
        require_same((len(paths), len(classes)), logits.shape, source_only.shape)
    return predictions_csv(paths, classes, logits, source_only)


def require_same(*shapes: tuple[int, ...]) -> None:
    """Files of a run that belong together must be about the same images and classes."""
    if len(set(shapes)) > 1:
        raise Misfit(
            f"images.csv, the model card and {LOGITS} are of {' and '.join(map(str, shapes))} images and classes"
        )


def confidence_views(before: np.ndarray, after: np.ndarray) -> dict[str, np.ndarray]:
    """Of views.npz: how sure both models are of each target image, and how far its probabilities moved, from their
    calibrated logits [Nt, K]."""
    p, q = probabilities(before), probabilities(after)
    arrays = {
        "confidence_before": p.max(axis=1),
        "confidence_after": q.max(axis=1),
        "changed": np.abs(p - q).sum(axis=1) / 2,
    }
    return {name: x.astype(np.float16) for name, x in arrays.items()}


def recalibrate(run: Path, temperature: float) -> None:
    """Change the temperature of a finished run's chosen model, and all that was recorded with the old one."""
    name, _ = find_model(run, "chosen")
    target_logits(run)  # an error before anything is changed
    set_temperature(run / name, temperature)
    refresh(run)


def refresh(run: Path) -> None:
    """Write predictions.csv and the confidences of views.npz anew, after another temperature."""
    source = target_logits(run, "source")
    content = predictions_of(run)
    with atomic(run / PREDICTIONS) as file:
        file.write(content)
    if (run / VIEWS).exists():
        sure = confidence_views(source, target_logits(run, "adapted") if (run / "adapted").exists() else source)
        with np.load(run / VIEWS) as arrays:
            views = {name: arrays[name] for name in arrays.files} | sure
        with atomic(run / VIEWS) as file:
            np.savez(file, **views)  # type: ignore[arg-type]


def target_paths(run: Path) -> list[str]:
    """The target images in the order of their indices."""
    file = run / "images.csv"
    with intact(file, RESTORE), open(file, encoding="utf-8", errors="surrogateescape", newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row["domain"] == "target"]
        return [str(row["path"]) for row in sorted(rows, key=lambda row: int(row["index"]))]


def target_digests(run: Path) -> tuple[str, ...]:
    """Of the pixels of its target images, in its order; none if images.csv is missing, damaged or of an older
    version."""
    try:
        with open(run / "images.csv", encoding="utf-8", errors="surrogateescape", newline="") as lines:
            return tuple(row["digest"] for row in csv.DictReader(lines) if row["domain"] == "target")
    except (OSError, KeyError, csv.Error):
        return ()
