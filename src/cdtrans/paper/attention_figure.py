"""`cdtrans ablate attention`: the paper's Fig. 2a for a finished run. Pairs of a source and a target image, and where
the source image looks in the target image: pairs that somebody names, or those that were trained on although their
images are of two classes, found with the answer key."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from cdtrans.config import make_config
from cdtrans.data.domains import UnlabelledDomain
from cdtrans.errors import CdtransError
from cdtrans.evaluation.evaluate import match_classes, scan_key
from cdtrans.model.card import load_model
from cdtrans.paper.known_pairs import METHODS
from cdtrans.paper.pair_quality import UNKNOWN, Answers
from cdtrans.report.gallery import BATCH, look, turn
from cdtrans.report.pictures import Pictures, enlarged, heated
from cdtrans.report.record import Record, Round, read_record
from cdtrans.runtime.device import pick_device
from cdtrans.runtime.screen import Screen
from cdtrans.storage.files import atomic

PICTURE_INCHES = 1.5
DPI = 144


@dataclass(frozen=True)
class Pair:
    """Two images of a run."""

    source: int  # indices of images
    target: int
    source_path: str
    target_path: str
    source_class: str
    true_class: str = ""  # of the target image, by the key
    round: int | None = None  # that kept it; None for a pair that was asked for


@dataclass(frozen=True)
class Shown:
    """The picture's pairs, and the two pictures and the attention of each."""

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
    """Leave a PNG at `out`: of the `chosen` pairs, each 'SOURCE,TARGET' by its images' paths within their domains, or
    without any of up to `pairs` false-positive ones."""
    if out.is_dir():
        raise CdtransError(f"'{out}' is a folder; --out must name the picture, such as '{out / 'attention.png'}'.")
    if out.suffix.lower() != ".png":
        raise CdtransError(f"The picture is a PNG; give --out '{out.with_suffix('.png')}' instead of '{out}'.")
    record = read_record(run)
    if not (run / "adapted").exists():
        raise CdtransError(f"The run in '{run}' ended before stage 2, so it has no adapted model to look through.")
    if chosen:
        found = tuple(named_pair(record, words) for words in chosen)
    else:
        found = tuple(islice(false_pairs(record, true_classes(record, key, root)), pairs))
        if not found:
            raise CdtransError(f"'{run}' kept no pair that the answer key '{key}' calls false: nothing to draw.")
    shown = Shown(found, tuple(attention(record, found, device)))
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic(out) as file:
        figure(shown).savefig(file, format="png", dpi=DPI, metadata={"Software": None})
    return shown


def named_pair(record: Record, words: str) -> Pair:
    """'SOURCE,TARGET' -> the pair; a path may hold commas."""
    for place in (i for i, letter in enumerate(words) if letter == ","):
        source_path, target_path = words[:place].strip(), words[place + 1 :].strip()
        if source_path in record.source and target_path in record.target:
            source, target = record.source.index(source_path), record.target.index(target_path)
            labels = record.view_arrays("source_labels")
            source_class = record.classes[labels[0][source]] if labels else ""
            return Pair(source, target, source_path, target_path, source_class)
    raise CdtransError(
        f"'{words}' is no pair of this run; give SOURCE,TARGET as images.csv has their paths, such as "
        f"'{record.source[0]},{record.target[0]}'."
    )


def true_classes(record: Record, key: Path | None, root: Path | None) -> np.ndarray:
    """[Nt] by the key, which is needed to find false pairs."""
    method = record.config.get("method", "cdtrans")
    if method not in ("cdtrans", *METHODS):
        raise CdtransError(f"The method '{method}' of '{record.run}' pairs images at random; name some with --pair.")
    if key is None:
        raise CdtransError("To find false pairs the answer key is needed: give --key LABELLED, or pairs with --pair.")
    labelled = scan_key(key, root)
    labels = match_classes(labelled, record.classes, key)
    target = UnlabelledDomain(record.root("target"), record.target)
    config = make_config(record.config | {"compile": "auto"})  # a run of an earlier version may name another
    answers = Answers(labelled.files(), labels.tolist(), target, config, Screen(quiet=True))
    true = answers.of_target(record.run)
    if (true == UNKNOWN).all():
        raise CdtransError(
            f"The answer key '{key}' has none of the target's pictures; give the target with its labels."
        )
    return true


def false_pairs(record: Record, true: np.ndarray) -> Iterator[Pair]:
    """Each once: those of the last round first, the classes in turn."""
    seen: set[tuple[int, int]] = set()  # a pair may be found from both sides, and in several rounds
    for r in reversed(record.rounds):
        for i in in_turn(r, true):
            source, target = int(r.source[i]), int(r.target[i])
            if (source, target) not in seen:
                seen.add((source, target))
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
    """The positions of a round's false pairs; a target image that the key does not name is in none."""
    wrong = r.kept & (true[r.target] != UNKNOWN) & (true[r.target] != r.source_labels)
    places = np.flatnonzero(wrong)
    return places[np.argsort(turn(r.source_labels[places]), kind="stable")] if len(places) else places


def attention(
    record: Record, pairs: tuple[Pair, ...], device: str
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Both pictures as the adapted model sees them, and its attention over the target's patches."""
    model, card = load_model(record.run / "adapted")
    where = pick_device(device)
    model.to(where)
    sizes = {"resize": card.resize, "crop": card.crop}
    source = Pictures(record.root("source"), record.source, **sizes)
    target = Pictures(record.root("target"), record.target, **sizes)
    source.fetch(pair.source for pair in pairs)
    target.fetch(pair.target for pair in pairs)
    if source.missing or target.missing:
        raise CdtransError(
            f"{source.missing + target.missing} images of the pairs can no longer be read; put them back."
        )
    pixels = [(source[pair.source], target[pair.target]) for pair in pairs]
    for start in range(0, len(pixels), BATCH):
        sources, targets = (np.stack(side) for side in zip(*pixels[start : start + BATCH], strict=True))  # type: ignore[arg-type]
        yield from zip(sources, targets, look(model, card, sources, targets, where), strict=True)


def figure(shown: Shown) -> Figure:
    """A row for each pair: source, target, and the target under the attention that it gets from the source."""
    rows = len(shown.pairs)
    whole = Figure(figsize=(3.4 * PICTURE_INCHES, 1.25 * PICTURE_INCHES * rows), layout="constrained")
    for axes, pair, (source, target, weights) in zip(
        whole.subplots(rows, 3, squeeze=False), shown.pairs, shown.pictures, strict=True
    ):
        titles = (_titled("source", pair.source_class), _titled("target", pair.true_class), "attention")
        for place, image, title in zip(
            axes, (enlarged(source), enlarged(target), heated(target, weights)), titles, strict=True
        ):
            place.imshow(np.asarray(image))
            place.set_title(title, fontsize=8, parse_math=False)  # a class may be called $x$
            place.set_axis_off()
    return whole


def _titled(side: str, name: str) -> str:
    return f"{side}: {name}" if name else side
