"""`cdtrans ablate attention`: the paper's Fig. 2a for a finished run. Pairs of images and the cross-attention of the
source image over the target image. The pairs are named by the user, or are false-positive pairs of the run: pairs of
two classes that were trained on, found with target labels."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from cdtrans.config import Resolved
from cdtrans.errors import CdtransError, counted
from cdtrans.inputs.scan import UnlabelledDomain
from cdtrans.measure.evaluate import match_classes, scan_key
from cdtrans.network.weights import load_model
from cdtrans.paper.known_pairs import METHODS
from cdtrans.paper.pair_quality import UNKNOWN, Answers
from cdtrans.record.files import atomic, intact
from cdtrans.record.layout import RESTORE
from cdtrans.record.run_folder import CONFIG, require_output
from cdtrans.reporting.gallery import BATCH, look, turn
from cdtrans.reporting.pictures import Pictures, enlarged, heated
from cdtrans.reporting.record import Record, Round, read_record
from cdtrans.runtime.device import pick_device
from cdtrans.runtime.screen import Screen
from cdtrans.schema import build

IMAGE_INCHES = 1.5  # of each image in the figure
DPI = 144


@dataclass(frozen=True)
class Pair:
    """Two images of a run."""

    source: int  # indices of images
    target: int
    source_path: str
    target_path: str
    source_class: str
    true_class: str = ""  # of the target image, by its label
    round: int | None = None  # in which it was kept; None for a pair named by the user


@dataclass(frozen=True)
class Shown:
    """The pairs of the figure, with the two images and the attention of each."""

    pairs: tuple[Pair, ...]
    pictures: tuple[tuple[np.ndarray, np.ndarray, np.ndarray], ...]  # uint8 twice; [rows, columns]

    def record(self) -> list[dict[str, Any]]:
        return [asdict(pair) for pair in self.pairs]


def draw_attention(
    run: Path,
    key: Path | None,
    out: Path,
    *,
    pairs: int,
    chosen: Sequence[str] = (),
    root: Path | None = None,
    device: str = "auto",
) -> Shown:
    """Write a PNG to `out`: of the `chosen` pairs, each 'SOURCE,TARGET' with paths relative to their domains, or else
    of up to `pairs` false-positive ones."""
    if out.is_dir():
        raise CdtransError(f"'{out}' is a folder; --out must be a file, such as '{out / 'attention.png'}'.")
    if out.suffix.lower() != ".png":
        raise CdtransError(f"The figure is a PNG; use --out '{out.with_suffix('.png')}' instead of '{out}'.")
    record = read_record(run)
    images = [record.root(domain) for domain in ("source", "target") if record.config.get(domain)]
    require_output(out, "figure", "--out", key, *images)
    if not (run / "adapted").exists():
        raise CdtransError(f"The run in '{run}' ended before stage 2, so it has no adapted model.")
    if chosen:
        drawn = tuple(named_pair(record, text) for text in chosen)
    else:
        true = true_classes(record, key, root)
        with intact(run, RESTORE):
            drawn = tuple(islice(false_pairs(record, true), pairs))
        if not drawn:
            raise CdtransError(f"'{run}' kept no pair that is false by the target labels '{key}': nothing to draw.")
    shown = Shown(drawn, tuple(attention(record, drawn, device)))
    with atomic(out) as file:
        figure(shown).savefig(file, format="png", dpi=DPI, metadata={"Software": None})
    return shown


def named_pair(record: Record, text: str) -> Pair:
    """'SOURCE,TARGET' -> the pair; a path may contain commas."""
    for comma in (i for i, letter in enumerate(text) if letter == ","):
        source_path, target_path = text[:comma].strip(), text[comma + 1 :].strip()
        if source_path in record.source and target_path in record.target:
            source, target = record.source.index(source_path), record.target.index(target_path)
            labels = record.view_arrays("source_labels")
            source_class = record.classes[labels[0][source]] if labels else ""
            return Pair(source, target, source_path, target_path, source_class)
    raise CdtransError(
        f"'{text}' is not a pair of this run; give SOURCE,TARGET with paths as in images.csv, such as "
        f"'{record.source[0]},{record.target[0]}'."
    )


def true_classes(record: Record, key: Path | None, root: Path | None) -> np.ndarray:
    """[Nt] by the key, which is needed to find false pairs."""
    method = record.config["method"]
    if method not in ("cdtrans", *METHODS):
        raise CdtransError(
            f"The method '{method}' of '{record.run}' chooses no pairs that it trains on; name some with --pair."
        )
    if key is None:
        raise CdtransError("Finding false pairs needs target labels: give --key LABELLED, or name pairs with --pair.")
    labelled = scan_key(key, root)
    labels = match_classes(labelled, record.classes, key)
    target = UnlabelledDomain(record.root("target"), record.target)
    file = record.run / CONFIG
    with intact(file, RESTORE):
        config = build(Resolved, record.config)
    answers = Answers(labelled.files(), labels.tolist(), target, config, Screen(quiet=True))
    true = answers.of_target(record.run)
    if (true == UNKNOWN).all():
        raise CdtransError(f"'{key}' has none of the target's images; give labelled images of the target.")
    return true


def false_pairs(record: Record, true: np.ndarray) -> Iterator[Pair]:
    """Every false pair once: the last round first, the classes in turn."""
    yielded: set[tuple[int, int]] = set()  # a pair may be mutual, and in several rounds
    for r in reversed(record.rounds):
        for i in in_turn(r, true):
            source, target = int(r.source[i]), int(r.target[i])
            if (source, target) not in yielded:
                yielded.add((source, target))
                yield Pair(
                    round=r.number,
                    source=source,
                    target=target,
                    source_path=record.source[source],
                    target_path=record.target[target],
                    source_class=record.classes[r.source_labels[i]],
                    true_class=record.classes[true[target]],
                )


def in_turn(r: Round, true: np.ndarray) -> np.ndarray:
    """The positions of a round's false pairs; unlabelled target images are in none."""
    wrong = r.kept & (true[r.target] != UNKNOWN) & (true[r.target] != r.source_labels)
    places = np.flatnonzero(wrong)
    return places[np.argsort(turn(r.source_labels[places]), kind="stable")] if len(places) else places


def attention(
    record: Record, pairs: tuple[Pair, ...], device: str
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Both images as the adapted model sees them, and its attention over the target's patches."""
    model, card = load_model(record.run / "adapted")
    where = pick_device(device)
    model.to(where)
    sizes = {"resize": card.resize, "crop": card.crop}
    source = Pictures(record.root("source"), record.source, **sizes)
    target = Pictures(record.root("target"), record.target, **sizes)
    source.fetch(pair.source for pair in pairs)
    target.fetch(pair.target for pair in pairs)
    if source.missing or target.missing:
        images = counted(source.missing + target.missing, "image")
        raise CdtransError(f"{images} of the pairs can no longer be read; put them back.")
    pixels = [(source[pair.source], target[pair.target]) for pair in pairs]
    for start in range(0, len(pixels), BATCH):
        sources, targets = (np.stack(side) for side in zip(*pixels[start : start + BATCH], strict=True))  # type: ignore[arg-type]
        yield from zip(sources, targets, look(model, card, sources, targets, where), strict=True)


def figure(shown: Shown) -> Figure:
    """A row per pair: source, target, and the target with the attention of the source."""
    rows = len(shown.pairs)
    whole = Figure(figsize=(3.4 * IMAGE_INCHES, 1.25 * IMAGE_INCHES * rows), layout="constrained")
    for axes, pair, (source, target, weights) in zip(
        whole.subplots(rows, 3, squeeze=False), shown.pairs, shown.pictures, strict=True
    ):
        titles = (_titled("source", pair.source_class), _titled("target", pair.true_class), "attention")
        for place, image, title in zip(
            axes, (enlarged(source), enlarged(target), heated(target, weights)), titles, strict=True
        ):
            place.imshow(np.asarray(image))
            place.set_title(title, fontsize=8, parse_math=False)  # a class name may contain $
            place.set_axis_off()
    return whole


def _titled(side: str, name: str) -> str:
    return f"{side}: {name}" if name else side
