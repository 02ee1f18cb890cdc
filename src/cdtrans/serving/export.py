"""Export a run's classifier for programs without cdtrans: as an ONNX graph, as weights for timm, or as a folder for the
Hugging Face hub with both, which `push` uploads. An export is checked against the model before it is put in place."""

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import numpy as np

from cdtrans.config import RunFolder, WhichModel
from cdtrans.errors import RunError, SettingsError
from cdtrans.record import layout, wording
from cdtrans.record.files import atomic, replace_folder
from cdtrans.record.record import RunRecord
from cdtrans.record.run import require_output
from cdtrans.runtime.screen import Screen
from cdtrans.runtime.signals import importing
from cdtrans.schema import Help, checked
from cdtrans.serving.classifier import Classifier, load
from cdtrans.serving.hub import CODE, MADE_BY, hub_card, require_name, upload

FORMATS = {".onnx": "onnx", ".safetensors": "timm"}
FOLDER_FILES = ("config.json", "model.safetensors", "model.onnx", "README.md", *CODE)
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
CHECKED = 8  # images of random noise, which exercise every part of a model
LARGEST_ONNX = 2**31 - 2**24  # bytes of weights: protobuf cannot write a file over 2 GiB
LARGEST_DIFFERENCE = 1e-3  # share of the largest logit; float32 with another order of additions differs by about 1e-6


@dataclass(frozen=True)
class Exported:
    """A written file or folder, and how well it agrees with the model. The keys are promised by `export --json`."""

    file: Path
    format: str  # onnx, timm or hub-folder
    model: str  # a description of the model
    classes: int
    bytes: int
    checked: int  # images
    difference: float  # largest difference of two logits, as a share of the largest logit

    def summary(self) -> dict[str, Any]:
        return asdict(self) | {"file": str(self.file)}


@checked()
def export(
    run: RunFolder,
    out: Annotated[
        str | Path | None,
        Help("FILE.onnx (default: RUN/model.onnx), FILE.safetensors (timm), or a hub folder (RUN/hub).", flag="--out"),
    ] = None,
    *,
    to: Annotated[Literal["file", "hub-folder"], Help("file, or hub-folder: weights, ONNX and a model card.")] = "file",
    model: WhichModel = "chosen",
    screen: Screen | None = None,
) -> Exported:
    """Write a finished run's classifier to `out`: `.onnx`, images in and probabilities out, or `.safetensors`, the
    weights of a plain timm model with its head. The default is RUN/model.onnx, or RUN/source.onnx and the like.

    With `to="hub-folder"`, `out` is a folder (default: RUN/hub) for the Hugging Face hub. transformers loads it, and
    timm unless the model has several taps."""
    record, screen = RunRecord(Path(run)), screen or Screen(quiet=True)
    record.model_name(model)
    if to == "hub-folder":
        return export_folder(record, Path(out or record.folder / "hub"), model=model, screen=screen)
    file = layout.ONNX if model == "chosen" else f"{model}.onnx"
    return export_file(record, Path(out or record.folder / file), model=model, screen=screen)


def export_file(run: RunRecord, file: Path, *, model: WhichModel, screen: Screen) -> Exported:
    """One file, in the format of its suffix."""
    kind = FORMATS.get(file.suffix.lower())
    if kind is None:
        raise SettingsError("export-suffix", f"'{file}' should end in .onnx, or in .safetensors for timm.")
    if kind == "onnx" and (missing := missing_packages()):
        raise SettingsError("package-missing", f"{missing}, or export a hub folder (--to hub-folder).")
    require_output(file, "export", "--out", Path(run.card(layout.SOURCE).weights))
    with importing():
        from cdtrans.serving.portable import onnx_file, open_onnx, read_timm, timm_file

    with screen.track(f"exporting {kind}", None):
        classifier = loaded(run, model, screen)
        if kind == "onnx" and (why := why_not_onnx(classifier)):
            raise SettingsError("onnx-too-large", f"{why}; export it as .safetensors.")
        content = (onnx_file if kind == "onnx" else timm_file)(classifier.model, classifier.card)
        with atomic(file) as draft:
            draft.write(content)
            draft.flush()
            exported = open_onnx(Path(draft.name))[0] if kind == "onnx" else read_timm(Path(draft.name))
            difference = largest_difference(classifier, exported)
    return Exported(file, kind, classifier.name, len(classifier.classes), len(content), CHECKED, difference)


def export_folder(run: RunRecord, folder: Path, *, model: WhichModel, screen: Screen, name: str = "") -> Exported:
    """config.json and model.safetensors for timm or transformers, model.onnx, and README.md, the model card; `name` is
    the repository's on the hub. What cannot be made is left out with a warning."""
    require_hub_folder(folder, run)
    with importing():
        from cdtrans.serving.portable import onnx_file, open_onnx, read_timm, why_no_weights, write_folder

    final = Path(os.path.realpath(folder))
    final.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{final.name}.", dir=final.parent) as place:
        draft = Path(place) / "draft"
        draft.mkdir()
        with screen.track("exporting a hub folder", None):
            classifier = loaded(run, model, screen)
            network, card = classifier.model, classifier.card
            no_weights, no_onnx = why_no_weights(network, card), why_not_onnx(classifier)
            if no_weights and no_onnx:
                raise SettingsError("nothing-to-export", f"There is nothing to export: {no_weights}, and {no_onnx}.")
            for left_out, why in {"config.json and model.safetensors": no_weights, "model.onnx": no_onnx}.items():
                if why:
                    screen.warn(f"The folder does not include {left_out}: {why}.")
            differences = []
            if not no_weights:
                write_folder(draft, network, card)
                differences.append(largest_difference(classifier, read_timm(draft)))
            if not no_onnx:
                graph = draft / "model.onnx"
                graph.write_bytes(onnx_file(network, card))
                differences.append(largest_difference(classifier, open_onnx(graph)[0]))
        (draft / "README.md").write_text(hub_card(run, model, card, folder=draft, name=name), encoding="utf-8")
        size = sum(file.stat().st_size for file in draft.iterdir())
        replace_folder(draft, final)
    return Exported(folder, "hub-folder", classifier.name, len(card.classes), size, CHECKED, max(differences))


def loaded(run: RunRecord, model: WhichModel, screen: Screen) -> Classifier:
    if warning := wording.trained_with_labels(run.outcome, run.model_name(model)):
        screen.warn(warning)
    return load(run.folder, model=model, device="cpu")


def require_hub_folder(folder: Path, run: RunRecord) -> None:
    """A new or empty folder, or one that was exported before and is not the backbone that the run started from."""
    card, start = folder / "README.md", run.card(layout.SOURCE)
    require_output(card, "model card", "--out", Path(start.weights), Path(start.backbone.removeprefix("local-dir:")))
    names = {file.name for file in folder.iterdir()} if folder.is_dir() else set()
    others = sorted(names - set(FOLDER_FILES))
    if folder.exists() and folder.samefile(Path.cwd()):
        why = "is the current folder, which would be replaced"
    elif others:
        why = f"holds other files, such as '{others[0]}'"
    elif names and not (card.is_file() and MADE_BY in card.read_text(encoding="utf-8", errors="replace")):
        why = "holds a model that 'cdtrans export' did not write"
    else:
        return
    raise SettingsError("folder-not-replaced", f"'{folder}' {why}; choose another --out.")


def missing_packages() -> str:
    """The packages that ONNX needs and that are missing, or empty."""
    missing = [name for name in ONNX_PACKAGES if find_spec(name) is None]
    return f"ONNX needs {' and '.join(missing)}: 'pip install {' '.join(missing)}'" if missing else ""


def why_not_onnx(classifier: Classifier) -> str:
    """The reason why there can be no ONNX file, or empty."""
    too_large = sum(x.numel() for x in classifier.model.parameters()) * 4 > LARGEST_ONNX
    return missing_packages() or ("The model is too large for one ONNX file (2 GiB)" if too_large else "")


def largest_difference(classifier: Classifier, exported: Callable[[np.ndarray], np.ndarray]) -> float:
    """The largest difference between the logits of the exported file and of the model, as a share of the largest logit.
    More than LARGEST_DIFFERENCE is an error."""
    size = classifier.card.resize
    images = np.random.default_rng(0).integers(0, 256, (CHECKED, size, size, 3), dtype=np.uint8)
    ours = classifier.logits(images)
    difference = float(np.abs(exported(images) - ours).max() / np.abs(ours).max())
    if not difference <= LARGEST_DIFFERENCE:
        advice = "it was not written; please report it with the versions of 'cdtrans --version'"
        raise RunError("export-differs", f"The export differs from the model (logits by {difference:.1g}): {advice}.")
    return difference


@dataclass(frozen=True)
class Pushed:
    """An uploaded model. The keys are promised by `push --json`."""

    name: str  # USER/NAME
    address: str
    model: str  # a description of the model
    bytes: int

    def summary(self) -> dict[str, Any]:
        return asdict(self)


@checked()
def push(
    run: RunFolder,
    name: Annotated[str, Help("The repository on the Hugging Face hub.", "USER/NAME")],
    *,
    private: Annotated[bool, Help("Make a new repository private.")] = False,
    model: WhichModel = "chosen",
    screen: Screen | None = None,
) -> Pushed:
    """Upload a finished run's classifier to USER/NAME: weights, ONNX and a model card; no image. With
    `private`, a new repository can be seen only by its owner. `cdtrans.load("hf://USER/NAME")` loads it."""
    record, screen = RunRecord(Path(run)), screen or Screen(quiet=True)
    require_name(name)
    record.model_name(model)
    with TemporaryDirectory(prefix="cdtrans-") as place:
        exported = export_folder(record, Path(place) / "hub", model=model, screen=screen, name=name)
        with screen.track(f"uploading to {name}", None):
            address = upload(exported.file, name, private=private)
    return Pushed(name, address, exported.model, exported.bytes)
