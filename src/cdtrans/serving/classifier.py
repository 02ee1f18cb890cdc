"""A trained model: images in, labels with probabilities out. torch is imported when a model is loaded, so that a wrong
run folder is reported at once."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cdtrans.config import require_device
from cdtrans.data.images import UnreadableImage, pixel_digest
from cdtrans.data.stream import Decoded, decode_in_order
from cdtrans.errors import CdtransError
from cdtrans.runtime.imports import importing
from cdtrans.runtime.notebook import html_table
from cdtrans.serving.exported import exported_file, is_exported, require_run
from cdtrans.serving.inputs import One, each_image
from cdtrans.serving.probabilities import no_class, probabilities
from cdtrans.storage.run_folder import find_model

if TYPE_CHECKING:
    import torch

    from cdtrans.model.card import Card
    from cdtrans.model.network import Network
    from cdtrans.serving.portable import Read

    Compute = Callable[[torch.Tensor], torch.Tensor]  # images [B, 3, crop, crop] -> a row for each

BATCH = 64  # images per forward pass
NAMED = 3  # classes that `repr` names


@dataclass(frozen=True)
class Prediction:
    """One image's label. `top` has the most probable classes, best first, and starts with (label, probability)."""

    path: Path | None  # None for an image that was not read from a file
    label: str  # empty where `cdtrans.predict` was to leave it out, being unsure
    probability: float
    top: tuple[tuple[str, float], ...]
    digest: str = ""  # of the pixels, with `digests`
    no_class: float | None = None  # with `unknown`, 0 to 1: the higher, the less the image is like any class


class Predictions(list[Prediction]):
    """A list of them, which a notebook shows as a table."""

    def html(self, title: str, *after: str) -> str:
        columns = ("path", "label", "probability", "no class")
        rows = [
            (
                "" if p.path is None else str(p.path),
                p.label,
                f"{p.probability:.3f}",
                "" if p.no_class is None else f"{p.no_class:.3f}",
            )
            for p in self
        ]
        shown = len(columns) if any(row[-1] for row in rows) else len(columns) - 1
        return html_table(title, columns[:shown], [row[:shown] for row in rows], *after)

    def _repr_html_(self) -> str:
        return self.html(f"{len(self)} image{'' if len(self) == 1 else 's'}")


@dataclass(frozen=True)
class Unreadable:
    """A file that cannot be read as an image, and why."""

    path: Path | None  # None for an image that was not read from a file
    cause: str


class Classifier:
    """A loaded model; `cdtrans.load(RUN)` returns one.

    Its methods take a folder, a list file, an image file, a PIL image, a numpy array or a torch tensor, or several
    images: an iterable of them or a batch. Arrays are uint8 from 0 to 255 or float from 0 to 1, of shape [H, W], [H, W,
    C] or [C, H, W], RGB; anything that would need a guess is an error."""

    def __init__(
        self, model: "Network", card: "Card", device: "torch.device", *, trained_with_key: bool = False
    ) -> None:
        self.model, self.card, self.device = model.to(device).eval(), card, device
        self.trained_with_key = trained_with_key  # in an ablation that trains with target labels
        self.source_only: Classifier | None = None  # whose probabilities the score for no class is made of
        self.at_once: int | None = None  # images in a forward pass, once a GPU has had too little memory for all

    @property
    def classes(self) -> tuple[str, ...]:
        return self.card.classes

    @property
    def classes_(self) -> np.ndarray:
        """[K] the same as an array, as in scikit-learn: the columns of `predict_proba`."""
        return np.array(self.classes)

    @property
    def name(self) -> str:
        return self.card.name

    def __repr__(self) -> str:
        more = ", ..." if len(self.classes) > NAMED else ""
        classes = f"{len(self.classes)} classes: {', '.join(self.classes[:NAMED])}{more}"
        return f"<Classifier {self.name}; {self.card.backbone}; {classes}; on {self.device}>"

    def predict(self, images: One | Iterable[One], *, top: int = 1) -> Predictions:
        """Labels in the order of the images."""
        return Predictions(map(_require_readable, self.stream(images, top=top)))

    def predict_proba(self, images: One | Iterable[One]) -> np.ndarray:
        """[N, K] the probabilities of all classes, in the order of `classes_`."""
        return self._rows(images, lambda pixels: probabilities(self.logits(pixels)), len(self.classes))

    def embed(self, images: One | Iterable[One]) -> np.ndarray:
        """[N, D] the backbone's features, before the head."""
        return self._rows(images, self.features, self.model.dim)

    def stream(
        self, images: One | Iterable[One], *, top: int = 1, batch: int = BATCH, digests: bool = False
    ) -> Iterator[Prediction | Unreadable]:
        """Labels for any number of images, in order, with a bounded number of them in memory. With `digests` each
        prediction also identifies its image by its pixels."""
        if top < 1:
            raise CdtransError(f"The number of classes to list, top, must be at least 1, not {top}.")
        for items in self._batches(images, batch):
            yield from self._classify(items, min(top, len(self.classes)), digests)

    def _batches(self, images: One | Iterable[One], batch: int) -> Iterator[list[Decoded]]:
        pixels = decode_in_order(each_image(images), self.card.resize)
        while items := list(islice(pixels, batch)):
            yield items

    def _rows(self, images: One | Iterable[One], make: Callable[[np.ndarray], np.ndarray], width: int) -> np.ndarray:
        """[N, width] what `make` computes of every image."""
        rows = [np.zeros((0, width), np.float32)]
        for items in self._batches(images, BATCH):
            rows.append(make(np.stack([_require_pixels(*item) for item in items])))
        return np.concatenate(rows)

    def _classify(self, items: list[Decoded], top: int, digests: bool) -> Iterator[Prediction | Unreadable]:
        readable = [pixels for _, pixels in items if isinstance(pixels, np.ndarray)]
        best = self._best(np.stack(readable), top) if readable else iter(())
        for path, pixels in items:
            if isinstance(pixels, UnreadableImage):
                yield Unreadable(path, str(pixels))
            else:
                ranked, score = next(best)
                digest = pixel_digest(pixels) if digests else ""
                yield Prediction(path, *ranked[0], top=ranked, digest=digest, no_class=score)

    def _best(self, pixels: np.ndarray, top: int) -> Iterator[tuple[tuple[tuple[str, float], ...], float | None]]:
        """uint8 [B, resize, resize, 3] -> the best classes of each image with their probabilities, and its score for
        no class."""
        import torch

        logits = self.logits(pixels)  # [B, K]
        values, classes = torch.from_numpy(logits).softmax(dim=1).topk(top, dim=1)
        scores: list[float | None] = [None] * len(pixels)
        if self.source_only is not None:
            scores = no_class(logits if self.source_only is self else self.source_only.logits(pixels)).tolist()
        for cs, vs, score in zip(classes.tolist(), values.tolist(), scores, strict=True):
            yield tuple((self.classes[c], v) for c, v in zip(cs, vs, strict=True)), score

    def logits(self, pixels: np.ndarray) -> np.ndarray:
        """uint8 [B, resize, resize, 3] -> float32 [B, K], divided by the model's temperature"""
        return self._computed(pixels, lambda images: self.model.encode(images).logits.float() / self.card.temperature)

    def features(self, pixels: np.ndarray) -> np.ndarray:
        """uint8 [B, resize, resize, 3] -> float32 [B, D]"""
        return self._computed(pixels, self.model.features)

    def _computed(self, pixels: np.ndarray, compute: "Compute") -> np.ndarray:
        """In smaller parts where a GPU has too little memory."""
        import torch

        from cdtrans.runtime.device import TOO_LITTLE, free_memory

        while True:
            most = min(self.at_once or len(pixels), len(pixels))
            try:
                parts = [pixels[i : i + most] for i in range(0, len(pixels), most)]
                return np.concatenate([self._compute(part, compute) for part in parts])
            except torch.cuda.OutOfMemoryError:
                pass  # continue where the exception no longer refers to the tensors of this try
            if most == 1:
                raise CdtransError(f"{TOO_LITTLE} to classify a single image; use --device cpu.")
            self.at_once = most // 2
            free_memory()

    def _compute(self, pixels: np.ndarray, compute: "Compute") -> np.ndarray:
        import torch

        from cdtrans.data.batches import Images
        from cdtrans.runtime.device import autocast

        card = self.card
        rows = np.arange(len(pixels))
        images = Images(pixels, rows, crop=card.crop, mean=card.mean, std=card.std, device=self.device)
        precision = card.precision if self.device.type == "cuda" else "fp32"  # as in training, for equal labels
        with torch.inference_mode(), autocast(self.device, precision):
            array: np.ndarray = compute(next(images.in_order(len(pixels)))).float().cpu().numpy()
        return array


class OnnxClassifier(Classifier):
    """An exported ONNX file, run by onnxruntime on the CPU."""

    def __init__(self, read: "Read", card: "Card", device: "torch.device") -> None:
        self.read, self.card, self.device = read, card, device
        self.trained_with_key, self.source_only = False, None

    def logits(self, pixels: np.ndarray) -> np.ndarray:
        return self.read(pixels)

    def embed(self, images: One | Iterable[One]) -> np.ndarray:
        raise CdtransError("An ONNX file gives probabilities and no features; load the run to embed images.")


def _require_readable(result: Prediction | Unreadable) -> Prediction:
    if isinstance(result, Unreadable):
        raise _unreadable(result.path, result.cause)
    return result


def _require_pixels(path: Path | None, pixels: np.ndarray | UnreadableImage) -> np.ndarray:
    if isinstance(pixels, UnreadableImage):
        raise _unreadable(path, str(pixels)) from pixels
    return pixels


def _unreadable(path: Path | None, cause: str) -> CdtransError:
    what = f"'{path}'" if path else "An image"
    return CdtransError(f"{what} cannot be read: {cause}; leave it out.")


def load(run: str | Path, *, model: str = "chosen", device: str = "auto", unknown: bool = False) -> Classifier:
    """The classifier of a finished run: the 'chosen' model, the 'source' (not adapted), the 'adapted' (selected epoch)
    or the 'last' (last epoch) one. With `unknown` its predictions have a score for no class, for which the source-only
    model looks at each image too.

    Also what `export` wrote: a file, a hub folder, or `hf://USER/NAME`, the folder that `push` uploaded."""
    if is_exported(run):
        require_run(run, {"unknown": unknown, "model": model != "chosen"})
        return _load_exported(exported_file(run), device)
    name, with_key = find_model(Path(run), model)
    require_device(device)
    with importing():
        from cdtrans.model.card import load_model
        from cdtrans.runtime.device import pick_device

    place = pick_device(device)
    classifier = Classifier(*load_model(Path(run) / name), place, trained_with_key=with_key)
    if unknown:
        is_source = name == "source"
        classifier.source_only = classifier if is_source else Classifier(*load_model(Path(run) / "source"), place)
    return classifier


def _load_exported(file: Path, device: str) -> Classifier:
    require_device(device)
    on_cpu = file.suffix.lower() == ".onnx"
    if on_cpu and device not in ("auto", "cpu"):
        raise CdtransError(f"An ONNX file is run on the CPU; leave --device {device} out, or load the run.")
    with importing():
        from cdtrans.runtime.device import pick_device
        from cdtrans.serving.portable import open_onnx, open_timm

    if on_cpu:
        return OnnxClassifier(*open_onnx(file), pick_device("cpu"))
    return Classifier(*open_timm(file), pick_device(device))


def key_warning(run: str | Path, classifier: Classifier) -> str:
    """A warning if the classifier was trained with target labels, else empty."""
    if not classifier.trained_with_key:
        return ""
    return f"The model of '{run}' was trained with target labels (cdtrans ablate): it says nothing about adaptation."
