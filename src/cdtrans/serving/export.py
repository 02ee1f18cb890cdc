"""Export a run's classifier as one file that needs no cdtrans: an ONNX graph, or weights for timm. The file is checked
against the model before it is written."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cdtrans.errors import CdtransError
from cdtrans.runtime.imports import importing
from cdtrans.runtime.screen import Screen
from cdtrans.storage.card_file import read_card
from cdtrans.storage.files import atomic
from cdtrans.storage.run_folder import CARD, find_model, require_output

if TYPE_CHECKING:
    from cdtrans.serving.classifier import Classifier

ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
CHECKED = 8  # images of random noise, which exercise every part of a model
LARGEST_ONNX = 2**31 - 2**24  # bytes of weights: protobuf cannot write a file over 2 GiB
TOLERANCE = 1e-3  # of the largest logit; float32 with another order of additions differs by about 1e-6


@dataclass(frozen=True)
class Exported:
    """A file that was written, and how well it agrees with the model. The keys are promised by `export --json`."""

    file: Path
    format: str  # onnx or timm
    model: str  # a description of the model
    classes: int
    bytes: int
    checked: int  # images
    difference: float  # of the logits, at most, as a share of the largest

    def summary(self) -> dict[str, Any]:
        return asdict(self) | {"file": str(self.file)}


def export(
    run: str | Path, out: str | Path | None = None, *, model: str = "chosen", screen: Screen | None = None
) -> Exported:
    """Write a finished run's classifier to `out`: `.onnx`, images in and probabilities out, or `.safetensors`, the
    weights of a plain timm model with its head. The default is RUN/model.onnx, or RUN/source.onnx and the like."""
    screen = screen or Screen(quiet=True)
    find_model(Path(run), model)
    file = Path(out) if out else Path(run) / f"{'model' if model == 'chosen' else model}.onnx"
    kind = format_of(file)
    require_output(file, "export", "--out", started_from(Path(run)))
    with importing():
        from cdtrans.serving.classifier import key_warning, load
        from cdtrans.serving.portable import onnx_file, read_onnx, read_timm, timm_file

    make, read = (onnx_file, read_onnx) if kind == "onnx" else (timm_file, read_timm)
    with screen.track(f"exporting {kind}", 3) as task:
        classifier = load(run, model=model, device="cpu")
        if warning := key_warning(run, classifier):
            screen.warn(warning)
        if kind == "onnx" and sum(x.numel() for x in classifier.model.parameters()) * 4 > LARGEST_ONNX:
            raise CdtransError("The model is too large for one ONNX file (2 GiB); export it as .safetensors.")
        task.advance(1)
        content = make(classifier.model, classifier.card)
        task.advance(1)
        difference = check(classifier, read(content))
        task.advance(1)
    with atomic(file) as written:
        written.write(content)
    return Exported(file, kind, classifier.name, len(classifier.classes), len(content), CHECKED, difference)


def started_from(run: Path) -> Path | None:
    """The weights file that the run's training started from."""
    weights = read_card(run / "source").get("weights") if (run / "source" / CARD).exists() else None
    return Path(weights) if isinstance(weights, str) else None


def format_of(file: Path) -> str:
    """The format by the suffix; the packages for ONNX must be installed."""
    kinds = {".onnx": "onnx", ".safetensors": "timm"}
    if file.suffix.lower() not in kinds:
        raise CdtransError(f"'{file}' should end in .onnx, or in .safetensors for weights that timm reads.")
    kind = kinds[file.suffix.lower()]
    missing = [name for name in ONNX_PACKAGES if find_spec(name) is None]
    if kind == "onnx" and missing:
        raise CdtransError(f"ONNX needs {' and '.join(missing)}: 'pip install cdtrans[onnx]', or export .safetensors.")
    return kind


def check(classifier: "Classifier", exported: Callable[[np.ndarray], np.ndarray]) -> float:
    """The largest difference between the logits of the exported file and of the model, as a share of the largest logit.
    More than TOLERANCE is an error."""
    size = classifier.card.resize
    images = np.random.default_rng(0).integers(0, 256, (CHECKED, size, size, 3), dtype=np.uint8)
    ours = classifier.logits(images)
    difference = float(np.abs(exported(images) - ours).max() / np.abs(ours).max())
    if not difference <= TOLERANCE:
        raise CdtransError(
            f"The exported file differs from the model (by {difference:.1g} of the largest logit) and was not written; "
            "please report it with the versions of 'cdtrans --version'."
        )
    return difference
