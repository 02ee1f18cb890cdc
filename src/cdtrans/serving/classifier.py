"""A trained model, of a run or exported: images in, labels with probabilities out. torch is imported when a model is
loaded, so that a wrong run folder is reported at once."""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cdtrans.config import WhichModel, require_device
from cdtrans.errors import DataError, MissingFileError, RunError, SettingsError, counted
from cdtrans.inputs.images import pixel_digest
from cdtrans.inputs.stream import DecodedBatch, ImageSource, cut, decode_batches
from cdtrans.record import layout
from cdtrans.record.files import intact
from cdtrans.record.probabilities import no_class, probabilities
from cdtrans.record.record import RunRecord
from cdtrans.runtime.screen import html_table
from cdtrans.runtime.signals import importing
from cdtrans.schema import checked
from cdtrans.serving.arrays import One, each_image
from cdtrans.serving.hub import download

if TYPE_CHECKING:
    import torch

    from cdtrans.network.network import Network
    from cdtrans.record.model import Card
    from cdtrans.runtime.device import ToHost
    from cdtrans.serving.portable import Read

    Compute = Callable[[torch.Tensor], torch.Tensor]  # images [B, 3, crop, crop] -> a row for each

CPU_BATCH = 64  # images per forward pass
GPU_BATCH = 256  # images per forward pass on a GPU: with fewer, launching kernels takes longer than running them
LISTED_CLASSES = 3  # classes that `repr` names
SUFFIXES = (".onnx", ".safetensors")
HUB_MODELS = ("model.safetensors", "model.onnx")  # in a hub folder; the first of them is loaded
ON_HUB = re.compile(r"hf:/*(.*)")  # as a path, 'hf://' has lost a slash


@dataclass(frozen=True)
class Prediction:
    """One image's label. `top` has the most probable classes, best first, and starts with (label, probability), unless
    `cdtrans.predict` has changed the label."""

    path: Path | None  # None for an image that was not read from a file
    label: str  # by `cdtrans.predict` also NO_CLASS, with `no_class` as its probability, or empty: too improbable
    probability: float
    top: tuple[tuple[str, float], ...]
    digest: str = ""  # identifies the pixels; with `digests`
    no_class: float | None = None  # from 0 to 1: the higher, the less the image is like any class; with `unknown`


class Predictions(list[Prediction]):
    """A list of predictions, which a notebook shows as a table."""

    def html(self, title: str, *after: str) -> str:
        columns = ["path", "label", "probability"]
        rows = [[str(p.path or ""), p.label, f"{p.probability:.3f}"] for p in self]
        if any(p.no_class is not None for p in self):
            columns.append("no class")
            rows = [[*row, f"{p.no_class:.3f}"] for row, p in zip(rows, self, strict=True)]
        return html_table(title, columns, rows, *after)

    def _repr_html_(self) -> str:
        return self.html(counted(len(self), "image"))


@dataclass(frozen=True)
class Unreadable:
    """A file that cannot be read as an image, and why."""

    path: Path | None  # None for an image that was not read from a file
    cause: str

    def error(self) -> DataError:
        what = f"'{self.path}'" if self.path else "An image"
        return DataError("image-unreadable", f"{what} cannot be read: {self.cause}; leave it out.")


class Classifier:
    """A loaded model; `cdtrans.load(RUN)` returns one.

    Its methods take a folder, a list file, an image file, a PIL image, a numpy array or a torch tensor, or several
    images: an iterable of them or a batch. Arrays are uint8 from 0 to 255 or float from 0 to 1, of shape [H, W], [H, W,
    C] or [C, H, W], RGB, or a batch with one more axis. Three axes are always one image; a batch of grey images is [N,
    H, W, 1] or [N, 1, H, W]. Anything that would need a guess is an error."""

    def __init__(self, model: "Network", card: "Card", device: "torch.device") -> None:
        import torch

        self.model, self.card, self.device = model.to(device).eval(), card, device
        self.mean, self.std = (torch.tensor(x, device=device).view(1, 3, 1, 1) for x in (card.mean, card.std))
        self.no_class: NoClassScore | None = None
        self.at_once: int | None = None  # images in a forward pass, once a GPU has had too little memory for all

    @property
    def classes(self) -> tuple[str, ...]:
        return self.card.classes

    @property
    def classes_(self) -> np.ndarray:
        """[K] the class names as an array, as in scikit-learn: the columns of `predict_proba`."""
        return np.array(self.classes)

    @property
    def name(self) -> str:
        return self.card.name

    def __repr__(self) -> str:
        more = ", ..." if len(self.classes) > LISTED_CLASSES else ""
        classes = f"{len(self.classes)} classes: {', '.join(self.classes[:LISTED_CLASSES])}{more}"
        return f"<Classifier {self.name}; {self.card.backbone}; {classes}; on {self.device}>"

    def predict(self, images: One | Iterable[One], *, top: int = 1) -> Predictions:
        """Labels in the order of the images."""
        predictions = Predictions()
        for result in self.stream(images, top=top):
            if isinstance(result, Unreadable):
                raise result.error()
            predictions.append(result)
        return predictions

    def predict_proba(self, images: One | Iterable[One]) -> np.ndarray:
        """[N, K] the probabilities of all classes, in the order of `classes_`."""
        return self._rows(images, lambda pixels: probabilities(self.logits(pixels)), len(self.classes))

    def embed(self, images: One | Iterable[One]) -> np.ndarray:
        """[N, D] the backbone's features, before the head."""
        return self._rows(images, self.features, self.model.dim)

    def stream(
        self, images: One | Iterable[One], *, top: int = 1, digests: bool = False
    ) -> Iterator[Prediction | Unreadable]:
        """Labels for any number of images, in order, with a bounded number of them in memory. With `digests` each
        prediction also identifies its image by its pixels."""
        return self.stream_batches(cut(each_image(images), self.batch), top=top, digests=digests)

    @property
    def batch(self) -> int:
        """Images per forward pass, unless a GPU has too little memory."""
        return GPU_BATCH if self.device.type == "cuda" else CPU_BATCH

    def stream_batches(
        self, batches: Iterable[Sequence[ImageSource]], *, top: int = 1, digests: bool = False
    ) -> Iterator[Prediction | Unreadable]:
        """Like `stream`, for images that are already divided into batches. The results of a batch are fetched after the
        next one has been launched, so that a GPU never waits for Python."""
        if top < 1:
            raise SettingsError("top-below-1", f"The number of classes to list, top, must be at least 1, not {top}.")
        launched = ((decoded, self._launch(decoded.pixels)) for decoded in self._decoded(batches))
        end: Any = None
        for (decoded, logits), _ in pairwise(chain(launched, [end])):
            yield from self._results(decoded, logits, top, digests)

    def _decoded(self, batches: Iterable[Sequence[ImageSource]]) -> Iterator[DecodedBatch]:
        """Batches in memory that a GPU can copy from while Python continues."""
        import torch

        pinned = self.device.type == "cuda"
        return decode_batches(
            batches, self.card.resize, lambda shape: torch.empty(shape, dtype=torch.uint8, pin_memory=pinned).numpy()
        )

    def _rows(self, images: One | Iterable[One], make: Callable[[np.ndarray], np.ndarray], width: int) -> np.ndarray:
        """[N, width] a row of `make` for every image."""
        rows = [np.zeros((0, width), np.float32)]
        for decoded in self._decoded(cut(each_image(images), self.batch)):
            for n, problem in decoded.problems.items():
                raise Unreadable(decoded.paths[n], problem).error()
            rows.append(make(decoded.pixels))
        return np.concatenate(rows)

    def _launch(self, pixels: np.ndarray) -> "list[ToHost]":
        """The logits [B, K]; with a score for no class also its values, [B]."""
        from cdtrans.runtime.device import ToHost

        wanted = [self.device_logits] if self.no_class is None else [self.device_logits, self.no_class.device_scores]
        return [ToHost(compute(pixels)) for compute in wanted if len(pixels)]

    def _results(
        self, decoded: DecodedBatch, launched: "list[ToHost]", top: int, digests: bool
    ) -> Iterator[Prediction | Unreadable]:
        import torch

        readable: Iterator[Any] = iter(())
        if launched:
            logits = [x.numpy() for x in launched]
            best = torch.from_numpy(logits[0]).softmax(dim=1).topk(min(top, len(self.classes)), dim=1)
            scores = [None] * len(logits[0])
            if self.no_class is not None:
                scores = no_class(logits[1], self.no_class.curve).tolist()
            readable = zip(best.values.tolist(), best.indices.tolist(), scores, decoded.pixels, strict=True)
        for n, path in enumerate(decoded.paths):
            if n in decoded.problems:
                yield Unreadable(path, decoded.problems[n])
                continue
            values, classes, score, pixels = next(readable)
            ranked = tuple((self.classes[c], value) for c, value in zip(classes, values, strict=True))
            digest = pixel_digest(pixels) if digests else ""
            yield Prediction(path, *ranked[0], top=ranked, digest=digest, no_class=score)

    def logits(self, pixels: np.ndarray) -> np.ndarray:
        """uint8 [B, resize, resize, 3] -> float32 [B, K], divided by the model's temperature"""
        return np.asarray(self.device_logits(pixels).cpu())

    def device_logits(self, pixels: np.ndarray) -> "torch.Tensor":
        """Like `logits`, but left on the device. A GPU may still be computing them."""
        return self.computed(pixels, lambda images: self.model.encode(images).logits.float() / self.card.temperature)

    def features(self, pixels: np.ndarray) -> np.ndarray:
        """uint8 [B, resize, resize, 3] -> float32 [B, D]"""
        return np.asarray(self.computed(pixels, self.model.features).cpu())

    def computed(self, pixels: np.ndarray, compute: "Compute") -> "torch.Tensor":
        """Compute in smaller parts if a GPU has too little memory."""
        import torch

        from cdtrans.runtime.device import half, until_it_fits

        images = torch.from_numpy(pixels)

        def attempt() -> torch.Tensor:
            parts = images.split(self.at_once or len(images))
            return torch.cat([self._compute(part, compute) for part in parts])

        def use_less() -> None:
            most = min(self.at_once or len(images), len(images))
            self.at_once = half(most, "classify", "use --device cpu")

        return until_it_fits(attempt, use_less)

    def _compute(self, images: "torch.Tensor", compute: "Compute") -> "torch.Tensor":
        import torch

        from cdtrans.inputs.batches import model_input
        from cdtrans.runtime.device import autocast

        card = self.card
        edge = round((card.resize - card.crop) / 2)
        centre = slice(edge, edge + card.crop)
        precision = card.precision if self.device.type == "cuda" else "fp32"  # as in training, for equal labels
        with torch.inference_mode(), autocast(self.device, precision):
            cropped = images.to(self.device, non_blocking=True)[:, centre, centre].contiguous()
            return compute(model_input(cropped, self.mean, self.std)).float()

    def digest(self) -> str:
        """A digest of the card and the weights, and of what the score for no class comes from."""
        content = hashlib.blake2b(repr(self.card).encode(), digest_size=16)
        for name, tensor in self.model.state_dict().items():
            content.update(name.encode() + tensor.cpu().contiguous().numpy().tobytes())
        return content.hexdigest() + ("" if self.no_class is None else self.no_class.digest())


class WholeClassifier(Classifier):
    """A model of a run with absent classes, for images of these too: what the source-only model takes for one of them
    has that model's probabilities. For all other images the probability of an absent class is 0."""

    def __init__(self, model: Classifier, source_only: Classifier) -> None:
        import torch

        super().__init__(model.model, replace(model.card, classes=source_only.classes), model.device)
        self.source_only = source_only  # with all classes
        self.absent = torch.tensor([name not in model.classes for name in self.classes], device=self.device)

    def device_logits(self, pixels: np.ndarray) -> "torch.Tensor":
        ours, theirs = super().device_logits(pixels), self.source_only.device_logits(pixels)
        whole = theirs.masked_fill(self.absent, float("-inf")).masked_scatter(~self.absent, ours)
        return theirs.where(self.absent[theirs.argmax(dim=1)][:, None], whole)

    def digest(self) -> str:
        return super().digest() + self.source_only.digest()


class NoClassScore:
    """How little new images are like any class: the scores of the run's nearest target images, in the features of the
    source-only model, and to a smaller part this model's own doubt (docs/results/unknown.md)."""

    def __init__(self, source_only: Classifier, record: RunRecord) -> None:
        import torch

        views = record.views
        self.source_only, self.curve = source_only, record.no_class_curve
        self.features = torch.from_numpy(views.before_target).float().to(source_only.device)  # [T, D]
        self.scores = torch.from_numpy(views.no_class[views.sampled_target]).to(source_only.device)  # [T]
        confidence = views.confidence_before.astype(np.float64)
        self.mean, self.deviation = float(confidence.mean()), float(confidence.std()) + 1e-9

    def device_scores(self, pixels: np.ndarray) -> "torch.Tensor":
        """uint8 [B, resize, resize, 3] -> [B], left on the device"""
        import torch

        from cdtrans.pairing.occurring import KEPT, score_of_nearest

        model, dim = self.source_only, self.features.shape[1]
        both = model.computed(pixels, lambda images: torch.cat(model.model.encode(images), dim=1))
        confidence = (both[:, dim:] / model.card.temperature).softmax(dim=1).amax(dim=1)
        doubt = (self.mean - confidence) / self.deviation
        return (1 - KEPT) * doubt + KEPT * score_of_nearest(both[:, :dim], self.features, self.scores)

    def digest(self) -> str:
        content = repr(self.curve).encode() + b"".join(x.cpu().numpy().tobytes() for x in (self.features, self.scores))
        return hashlib.blake2b(content, digest_size=16).hexdigest()


class OnnxClassifier(Classifier):
    """An exported ONNX file, run by onnxruntime on the CPU."""

    def __init__(self, file: Path, read: "Read", card: "Card", device: "torch.device") -> None:
        self.file, self.read, self.card, self.device = file, read, card, device
        self.no_class = None

    def device_logits(self, pixels: np.ndarray) -> "torch.Tensor":
        import torch

        from cdtrans.serving.portable import EXPORT_AGAIN

        with intact(self.file, EXPORT_AGAIN):
            return torch.from_numpy(self.read(pixels))

    def digest(self) -> str:
        return hashlib.blake2b(self.file.read_bytes(), digest_size=16).hexdigest()

    def embed(self, images: One | Iterable[One]) -> np.ndarray:
        raise SettingsError("onnx-features", "An ONNX file gives no features; load the run to embed images.")


@checked()
def load(
    run: str | Path,
    *,
    model: WhichModel = "chosen",
    device: str = "auto",
    unknown: bool = False,
    all_classes: bool = False,
) -> Classifier:
    """Load the classifier of a finished run: the 'chosen' model, the 'source' (not adapted), the 'adapted' (selected
    epoch) or the 'last' (last epoch) one. It predicts the classes that occur in the run's target. With `all_classes`,
    an image that the source-only model takes for one of the others gets that model's label. With `unknown`, predictions
    have a score for images of no class. For both the source-only model also runs on each image.

    It also loads what `export` wrote, a file or a hub folder, and `hf://USER/NAME`, a folder that `push` uploaded."""
    require_device(device)
    record = find_model(run, {"unknown": unknown, "all-classes": all_classes, "model": model != "chosen"})
    if isinstance(record, Path):
        return _load_exported(record, device)
    name = record.model_name(model)
    absent = record.outcome.class_set.absent
    with importing():
        import torch

        from cdtrans.network.weights import load_model
        from cdtrans.pairing.narrowing import narrowed
        from cdtrans.runtime.device import pick_device

    place = pick_device(device)

    def saved(name: str, *, whole: bool = False) -> Classifier:
        network, card = load_model(record.model_folder(name))
        occurring = [k for k, label in enumerate(card.classes) if label not in absent]
        if not whole and len(occurring) < len(card.classes):  # the source-only model, as it was saved
            network = narrowed(network, torch.tensor(occurring))
            card = replace(card, classes=tuple(card.classes[k] for k in occurring))
        return Classifier(network, card, place)

    classifier = saved(name, whole=all_classes)
    if all_classes and absent and name != layout.SOURCE:
        classifier = WholeClassifier(classifier, saved(layout.SOURCE, whole=True))
    if unknown:
        classifier.no_class = NoClassScore(saved(layout.SOURCE), record)
    return classifier


def find_model(place: str | Path, run_options: dict[str, bool]) -> RunRecord | Path:
    """A run, or the file that `export` wrote, existing or not; one on the hub is downloaded. `run_options` are given
    (True) or not, and need what only a run has."""
    path = Path(place)
    on_hub = ON_HUB.fullmatch(path.as_posix())
    if path.is_dir():
        is_model = RunRecord(path).begun or (path / layout.CARD).exists()
        is_exported = not is_model and any((path / name).exists() for name in HUB_MODELS)
    else:
        is_exported = path.suffix.lower() in SUFFIXES or on_hub is not None
    if not is_exported:
        return RunRecord(path)
    if flag := next((name for name, given in run_options.items() if given), None):
        raise SettingsError("needs-a-run", f"--{flag} needs a run folder, not the exported '{place}'; leave it out.")
    if on_hub:
        path = download(on_hub[1], HUB_MODELS)
    if path.is_dir():
        file = next((path / name for name in HUB_MODELS if (path / name).exists()), None)
        if file is None:
            models = " nor ".join(HUB_MODELS)
            raise RunError("no-model", f"'{place}' holds neither {models}; 'cdtrans push' uploads them.")
        path = file
    if not path.is_file():
        raise MissingFileError("no-exported-file", f"'{path}' does not exist; 'cdtrans export RUN' writes such files.")
    if path.suffix.lower() == ".onnx" and find_spec("onnxruntime") is None:
        raise SettingsError("package-missing", f"'{path}' needs onnxruntime: 'pip install onnxruntime'.")
    return path


def _load_exported(file: Path, device: str) -> Classifier:
    is_onnx = file.suffix.lower() == ".onnx"
    if is_onnx and device not in ("auto", "cpu"):
        raise SettingsError("onnx-device", f"ONNX files run on the CPU; leave --device {device} out, or load the run.")
    with importing():
        from cdtrans.runtime.device import pick_device
        from cdtrans.serving.portable import open_onnx, open_timm

    if is_onnx:
        return OnnxClassifier(file, *open_onnx(file), pick_device("cpu"))
    return Classifier(*open_timm(file), pick_device(device))
