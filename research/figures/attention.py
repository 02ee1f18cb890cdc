"""The paper's Fig. 2a for a finished run:

    python -m research.figures.attention RUN --labels LABELLED --out FILE.png

Pairs of images and the cross-attention of the
source image over the target image. The pairs are named by the user, or are false-positive pairs of the run: pairs of
two classes that were trained on, found with target labels."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from cdtrans.cli import app
from cdtrans.cli.options import Verb
from cdtrans.config import HELP, DeviceName, Root, RunFolder
from cdtrans.errors import DataError, RunError, SettingsError, counted
from cdtrans.inputs.scan import UnlabelledDomain
from cdtrans.measure.matching import match_classes, scan_labels
from cdtrans.paper.pair_labels import UNKNOWN, TargetClasses
from cdtrans.record.files import atomic
from cdtrans.record.layout import PairsRecord
from cdtrans.record.record import RunRecord
from cdtrans.record.run import require_output
from cdtrans.reporting.images import DomainImages, enlarged, heated
from cdtrans.runtime.screen import Screen
from cdtrans.schema import Help, Range

if TYPE_CHECKING:
    from matplotlib.figure import Figure

IMAGE_INCHES = 1.5  # side of each image
DPI = 144


@dataclass(frozen=True)
class Pair:
    """Two images of a run."""

    source: int  # index of the image, as is `target`
    target: int
    source_path: str
    target_path: str
    source_class: str
    true_class: str = ""  # the target image's, by its label
    round: int | None = None  # the round that kept it; None for a pair named by the user


@dataclass(frozen=True)
class Shown:
    """The pairs of the figure."""

    out: Path
    pairs: tuple[Pair, ...]
    images: tuple[tuple[np.ndarray, np.ndarray, np.ndarray], ...]  # source, target: uint8; attention [rows, columns]

    def summary(self) -> dict[str, Any]:
        """The object that --json prints."""
        return {"out": str(self.out), "pairs": [asdict(pair) for pair in self.pairs]}


def draw_attention(
    run: RunFolder,
    *,
    out: Annotated[str | Path, Help("The figure, a PNG.", "FILE")],
    labels: Annotated[
        str | Path | None, Help("The run's target with its labels. Finds false pairs.", "LABELLED")
    ] = None,
    pairs: Annotated[int, Help("How many false pairs to show at most."), Range(1, 100)] = 8,
    pair: Annotated[
        Sequence[str] | None, Help("Show this pair (paths as in images.csv); may be repeated.", "SOURCE,TARGET")
    ] = None,
    root: Root = None,
    device: DeviceName = "auto",
) -> Shown:
    """Write a PNG to `out`: each `pair`, as 'SOURCE,TARGET' with paths relative to their domains, or else up to `pairs`
    false-positive ones."""
    out, labels = Path(out), None if labels is None else Path(labels)
    if out.suffix.lower() != ".png":
        raise SettingsError(
            "figure-not-png", f"The figure is a PNG; use --out '{out.with_suffix('.png')}' instead of '{out}'."
        )
    record = RunRecord(Path(run))
    model = record.model_name("adapted")
    source = record.root("source") if record.config.source else None
    require_output(out, "figure", "--out", labels, source, record.root("target"))
    if pair:
        drawn = tuple(named_pair(record, text) for text in pair)
    else:
        true = true_classes(record, labels, None if root is None else Path(root))
        drawn = tuple(islice(false_pairs(record, true), pairs))
        if not drawn:
            raise DataError(
                "no-false-pair",
                f"'{run}' kept no pair that is false by the target labels '{labels}': nothing to draw.",
            )
    shown = Shown(out, drawn, tuple(attention(record, model, drawn, device)))
    with atomic(out) as file:
        figure(shown).savefig(file, format="png", dpi=DPI, metadata={"Software": None})
    return shown


def named_pair(record: RunRecord, text: str) -> Pair:
    """'SOURCE,TARGET' -> the pair; a path may contain commas."""
    sources, targets = (record.images.paths[domain] for domain in ("source", "target"))
    for comma in (i for i, letter in enumerate(text) if letter == ","):
        source_path, target_path = text[:comma].strip(), text[comma + 1 :].strip()
        if source_path in sources and target_path in targets:
            source, target = sources.index(source_path), targets.index(target_path)
            source_class = record.classes[record.views.source_labels[source]]
            return Pair(source, target, source_path, target_path, source_class)
    example = f", such as '{sources[0]},{targets[0]}'" if sources and targets else ""
    raise SettingsError(
        "pair-unknown", f"'{text}' is not a pair of this run; give SOURCE,TARGET with paths as in images.csv{example}."
    )


def true_classes(record: RunRecord, labels: Path | None, root: Path | None) -> np.ndarray:
    """[Nt] classes of the target images by their labels, which are needed to find false pairs."""
    from cdtrans.paper.known_pairs import row_class

    config = record.config
    method = row_class(config.method)
    if not (method.trains and method.pairs_mean):
        raise RunError(
            "no-pairs",
            f"The method '{config.method}' of '{record.folder}' chooses no pairs that it trains on; name some with "
            "--pair.",
        )
    if labels is None:
        raise SettingsError(
            "no-labels", "Finding false pairs needs target labels: give --labels LABELLED, or name pairs with --pair."
        )
    labelled = scan_labels(labels, root)
    classes = match_classes(labelled, record.classes, labels).tolist()
    target = UnlabelledDomain(record.root("target"), record.images.paths["target"])
    true = TargetClasses(labelled.files(), classes, target, config, Screen(quiet=True)).in_order(record)
    if (true == UNKNOWN).all():
        raise DataError(
            "labels-not-of-target", f"'{labels}' has none of the target's images; give labelled images of the target."
        )
    return true


def false_pairs(record: RunRecord, true: np.ndarray) -> Iterator[Pair]:
    """Every false pair once: the last round first, the classes in turn."""
    sources, targets = (record.images.paths[domain] for domain in ("source", "target"))
    yielded: set[tuple[int, int]] = set()  # a pair may be mutual, and in several rounds
    for number, pairs in reversed(record.rounds.items()):
        for i in false_positions(pairs, true):
            source, target = int(pairs.source[i]), int(pairs.target[i])
            if (source, target) not in yielded:
                yielded.add((source, target))
                yield Pair(
                    round=number,
                    source=source,
                    target=target,
                    source_path=sources[source],
                    target_path=targets[target],
                    source_class=record.classes[pairs.source_labels[i]],
                    true_class=record.classes[true[target]],
                )


def false_positions(pairs: PairsRecord, true: np.ndarray) -> list[int]:
    """The positions of a round's false pairs; unlabelled target images are in none."""
    from cdtrans.reporting.gallery import in_turn

    wrong = pairs.kept & (true[pairs.target] != UNKNOWN) & (true[pairs.target] != pairs.source_labels)
    places = np.flatnonzero(wrong)
    labels = pairs.source_labels[places]
    return in_turn([places[labels == k].tolist() for k in dict.fromkeys(labels.tolist())])


def attention(
    record: RunRecord, model_name: str, pairs: tuple[Pair, ...], device: str
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Both images as the adapted model sees them, and its attention over the target's patches."""
    from cdtrans.network.weights import load_model
    from cdtrans.reporting.attention import PAIRS_AT_ONCE, look
    from cdtrans.runtime.device import pick_device

    model, card = load_model(record.model_folder(model_name))
    where = pick_device(device)
    model.to(where)
    sizes = {"resize": card.resize, "crop": card.crop}
    source = DomainImages(record.root("source"), record.images.paths["source"], **sizes)
    target = DomainImages(record.root("target"), record.images.paths["target"], **sizes)
    pixels = list(zip(source.fetch(p.source for p in pairs), target.fetch(p.target for p in pairs), strict=True))
    if source.missing or target.missing:
        images = counted(source.missing + target.missing, "image")
        raise DataError("images-gone", f"{images} of the pairs can no longer be read; put them back.")
    for start in range(0, len(pixels), PAIRS_AT_ONCE):
        sources, targets = (np.stack(side) for side in zip(*pixels[start : start + PAIRS_AT_ONCE], strict=True))  # type: ignore[arg-type]
        yield from zip(sources, targets, look(model, card, sources, targets, where), strict=True)


def figure(shown: Shown) -> "Figure":
    """A row per pair: source, target, and the target with the attention of the source."""
    from matplotlib.figure import Figure

    rows = len(shown.pairs)
    whole = Figure(figsize=(3.4 * IMAGE_INCHES, 1.25 * IMAGE_INCHES * rows), layout="constrained")
    for axes, pair, (source, target, weights) in zip(
        whole.subplots(rows, 3, squeeze=False), shown.pairs, shown.images, strict=True
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


def show(result: Shown, screen: Screen, given: dict[str, Any]) -> None:
    kind = "chosen" if given["pair"] else "false-positive"
    screen.result(f"{counted(len(result.pairs), f'{kind} pair')}: {result.out}")


def main() -> None:
    """The command, with the common flags of the verbs of `cdtrans`."""
    about = "Draw the attention of false-positive pairs of RUN, found with target labels, or of chosen pairs."
    HELP["verbs"]["attention"] = about
    app.VERBS["attention"] = Verb("research.figures.attention:draw_attention", show)
    sys.argv.insert(1, "attention")
    app.run_program()


if __name__ == "__main__":
    main()
