"""A trained model: images in, labels with probabilities out. torch is imported when a model is loaded, so that a wrong
run folder is reported at once."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from cdtrans.config import require_device
from cdtrans.data.domains import stream_images
from cdtrans.data.images import UnreadableImage, pixel_digest
from cdtrans.data.stream import Decoded, decode_in_order
from cdtrans.errors import CdtransError
from cdtrans.runtime.imports import importing
from cdtrans.serving.probabilities import no_class
from cdtrans.storage.run_folder import find_model

if TYPE_CHECKING:
    import torch

    from cdtrans.model.card import Card
    from cdtrans.model.network import Network

BATCH = 64  # images per forward pass


@dataclass(frozen=True)
class Prediction:
    """One image's label. `top` has the most probable classes, best first, and starts with (label, probability)."""

    path: Path | None  # None for an image that was not read from a file
    label: str
    probability: float
    top: tuple[tuple[str, float], ...]
    digest: str = ""  # of the pixels, with `digests`
    no_class: float | None = None  # with `unknown`, 0 to 1: the higher, the less the image is like any class


@dataclass(frozen=True)
class Unreadable:
    """A file that cannot be read as an image, and why."""

    path: Path | None  # None for an image that was not read from a file
    cause: str


class Classifier:
    """A loaded model; `cdtrans.load(RUN)` returns one."""

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
    def name(self) -> str:
        return self.card.name

    def predict(
        self, images: str | Path | Image.Image | Iterable[str | Path | Image.Image], *, top: int = 1
    ) -> list[Prediction]:
        """Labels for a folder, a file, a PIL image, or several files or PIL images, in their order."""
        if isinstance(images, str | Path):
            images = stream_images(Path(images))
        results = []
        for result in self.stream([images] if isinstance(images, Image.Image) else images, top=top):
            if isinstance(result, Unreadable):
                what = f"'{result.path}'" if result.path else "An image"
                raise CdtransError(f"{what} cannot be read: {result.cause}; leave it out.")
            results.append(result)
        return results

    def stream(
        self, images: Iterable[str | Path | Image.Image], *, top: int = 1, batch: int = BATCH, digests: bool = False
    ) -> Iterator[Prediction | Unreadable]:
        """Labels for any number of images, in order, with a bounded number of them in memory. With `digests` each
        prediction also identifies its image by its pixels."""
        if top < 1:
            raise CdtransError(f"The number of classes to list, top, must be at least 1, not {top}.")
        pixels = decode_in_order(images, self.card.resize)
        while items := list(islice(pixels, batch)):
            yield from self._classify(items, min(top, len(self.classes)), digests)

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
        import torch

        from cdtrans.runtime.device import TOO_LITTLE, free_memory

        while True:
            most = min(self.at_once or len(pixels), len(pixels))
            try:
                return np.concatenate([self._logits(pixels[i : i + most]) for i in range(0, len(pixels), most)])
            except torch.cuda.OutOfMemoryError:
                pass  # continue where the exception no longer refers to the tensors of this try
            if most == 1:
                raise CdtransError(f"{TOO_LITTLE} to classify a single image; use --device cpu.")
            self.at_once = most // 2
            free_memory()

    def _logits(self, pixels: np.ndarray) -> np.ndarray:
        import torch

        from cdtrans.data.batches import Images
        from cdtrans.runtime.device import autocast

        card = self.card
        rows = np.arange(len(pixels))
        images = Images(pixels, rows, crop=card.crop, mean=card.mean, std=card.std, device=self.device)
        precision = card.precision if self.device.type == "cuda" else "fp32"  # as in training, for equal labels
        with torch.inference_mode(), autocast(self.device, precision):
            logits = self.model.encode(next(images.in_order(len(pixels)))).logits
        array: np.ndarray = (logits.float() / card.temperature).cpu().numpy()
        return array


def load(run: str | Path, *, model: str = "chosen", device: str = "auto", unknown: bool = False) -> Classifier:
    """The classifier of a finished run: the 'chosen' model, the 'source' (not adapted), the 'adapted' (selected epoch)
    or the 'last' (last epoch) one. With `unknown` its predictions have a score for no class, for which the source-only
    model looks at each image too."""
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


def key_warning(run: str | Path, classifier: Classifier) -> str:
    """A warning if the classifier was trained with target labels, else empty."""
    if not classifier.trained_with_key:
        return ""
    return f"The model of '{run}' was trained with target labels (cdtrans ablate): it says nothing about adaptation."
