"""Check two sets of images before a run, without a model.

`examine` works on the digests and thumbnails that decoding makes, so `adapt` can run it every time. The target comes
in as images only: no label of it is available here.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from cdtrans.errors import DataError, counted, first_of, named
from cdtrans.inputs.images import Header, Traces
from cdtrans.trust.duplicates import PLAIN, exact_groups, near_groups

FEW = 5  # images of a class; fewer do not fill the folds of a five-fold check, and teach little
BALANCE = 10.0  # largest class to smallest; Office-31 has 4.4 at most, and the losses are not weighted by class
COPIES = 0.1  # share of the source; a copy gives its image twice the weight, and beyond a tenth that matters
CONTRADICTED = 0.25  # share of the source; at least one label in eight is then wrong, more than in real data sets
LEAKED = 0.5  # share of the target; most of it is then in the source with a label, and there is no second domain
BLANK, MOSTLY_BLANK = 0.01, 0.5  # shares of a domain; many blank images usually mean a failed export
COLOURLESS = 4  # grey levels between the channels of a thumbnail; JPEG adds about one to a greyscale image
GAP = 0.25  # difference of the domains' shares; a model could learn it instead of the classes
ENLARGED = 4.0  # model's input to image; most pixels are then interpolated
STRETCHED = 4.0  # longer side to shorter; both are resized to one length
ODD = 0.05  # share of odd sizes in a domain, beyond which there is a warning
LISTED_CLASSES = 12  # more would not fit on a line

Severity = Literal["ok", "warning", "stop"]
LISTING = "'cdtrans check --json' lists them"  # names the command, because `adapt` prints the advice too
GRAVITY: tuple[Severity, ...] = ("ok", "warning", "stop")


@dataclass(frozen=True)
class Finding:
    """`stop`: a run would be pointless or its result wrong. `warning`: worth a look before a run."""

    state: Severity
    subject: str
    statement: str  # a sentence without its full stop
    advice: str = ""  # a sentence; empty if nothing is wrong
    details: dict[str, Any] = field(default_factory=dict)  # every name and number, for --json

    def summary(self) -> dict[str, Any]:
        """The promised keys of a finding in `check --json`."""
        return {"found" if name == "statement" else name: value for name, value in vars(self).items()}


def gravest(findings: Sequence[Finding]) -> Severity:
    return max((f.state for f in findings), key=GRAVITY.index, default="ok")


def graded(value: float, *, warning: float, stop: float = float("inf")) -> Severity:
    """The state of a share or ratio that should be small."""
    return "stop" if value > stop else "warning" if value > warning else "ok"


def refuse(findings: Sequence[Finding]) -> None:
    """Raise an error with the first reason to stop."""
    stops = [f for f in findings if f.state == "stop"]
    if stops:
        more = f" ({len(stops) - 1} more: see 'cdtrans check')" if len(stops) > 1 else ""
        sentence = f"{stops[0].statement}{more}. {stops[0].advice} To continue anyway, use --force."
        raise DataError("data-refused", sentence)


def examine(source: Traces, labels: Sequence[int], counts: Mapping[str, int], target: Traces) -> list[Finding]:
    """The findings on readable images that `check` and `adapt` share. The source's labels are indices into the classes,
    whose images `counts` has."""
    names = list(counts)
    digests = [*source.digests, *target.digests]
    exact = exact_groups(digests)
    near = near_groups(digests, np.concatenate([source.thumbnails, target.thumbnails]))
    return [
        class_sizes(counts),
        class_balance(counts),
        target_size(len(counts), target),
        copies_in_source(source.paths, exact, near),
        contradictions(source.paths, [names[label] for label in labels], exact, near),
        leak(source.paths, target.paths, exact, near),
        blank_images("source", source),
        blank_images("target", target),
        colour(source.thumbnails, target.thumbnails),
    ]


def examine_target(classes: int, target: Traces) -> list[Finding]:
    """The findings where there is no source."""
    return [target_size(classes, target), blank_images("target", target)]


def unreadable(name: str, bad: Mapping[str, str], total: int, max_bad: float) -> Finding:
    """`adapt` has the same limit but raises its own error."""
    subject, details = f"{name} files", {"files": total, "unreadable": dict(bad)}
    if not bad:
        return Finding("ok", subject, f"All {total} can be read", details=details)
    causes = first_of([f"{path!r} ({cause})" for path, cause in bad.items()])
    statement = f"{len(bad)} of {total} {name} files cannot be read: {causes}"
    state = "stop" if len(bad) == total else graded(len(bad) / total, warning=0.0, stop=max_bad)
    advice = "Repair or remove them; a run skips " + ("no more than --max-bad." if state == "stop" else "them.")
    return Finding(state, subject, statement, advice, details)


def ignored(name: str, paths: Sequence[str]) -> Finding:
    """Files that are ignored because of their suffix. `name` is the domain, or empty."""
    subject, details = f"ignored files, {name}", {"files": list(paths)}
    if not paths:
        return Finding("ok", subject, f"No {name} file is ignored because of its extension", details=details)
    endings = Counter(os.path.splitext(path)[1].lower() for path in paths).most_common()
    listed = first_of([f"{count} {repr(ending) if ending else 'without'}" for ending, count in endings])
    files = counted(len(paths), f"{name} file".lstrip())
    statement = f"Ignored because of the extension: {files} ({listed}), {named(paths)}"
    advice = "If they are images, convert them (HEIC and AVIF too) to JPEG or PNG, or rename those that already are."
    return Finding("warning", subject, statement, advice, details)


def class_sizes(counts: Mapping[str, int]) -> Finding:
    """Readable images per class."""
    details = {"images": dict(counts)}
    empty, few = ([name for name, count in counts.items() if count < limit] for limit in (1, FEW))
    if empty:
        classes = counted(len(empty), "class", "classes")
        statement = f"No readable image is left of {classes} of the source: {named(empty)}"
        return Finding("stop", "classes", statement, "Repair or remove the class.", details)
    if few:
        have = counted(len(few), "class has", "classes have")
        statement = f"{have} fewer than {FEW} source images: {named(few)}"
        return Finding("warning", "classes", statement, "Add images, or leave such classes out.", details)
    statement = f"{len(counts)} classes of {min(counts.values())} to {max(counts.values())} images"
    if len(counts) <= LISTED_CLASSES:
        statement = f"{len(counts)} classes: " + ", ".join(f"{name!r} {count}" for name, count in counts.items())
    return Finding("ok", "classes", statement, details=details)


def class_balance(counts: Mapping[str, int]) -> Finding:
    sizes = sorted((count, name) for name, count in counts.items() if count)
    (fewest, least), (largest, most) = sizes[0], sizes[-1]
    ratio = largest / fewest
    statement = "All source classes have the same number of images"
    if ratio > 1:
        statement = f"The largest source class, {most!r}, has {ratio:.3g} times the images of the smallest, {least!r}"
    advice = "Add images of the small classes, or use fewer of the large ones: the model will favour the large ones."
    state = graded(ratio, warning=BALANCE)
    return Finding(state, "balance", statement, advice if state != "ok" else "", {"largest_to_smallest": ratio})


def target_size(classes: int, target: Traces) -> Finding:
    distinct = len(set(target.digests))
    details = {"images": len(target.digests), "distinct": distinct}
    if distinct < classes:
        statement = f"The target has {counted(distinct, 'different image')} for {classes} classes"
        return Finding("warning", "target size", statement, "Add target images: some classes must be missing.", details)
    return Finding("ok", "target size", f"The target has {counted(distinct, 'different image')}", details=details)


def copies_in_source(paths: Sequence[str], exact: np.ndarray, near: np.ndarray) -> Finding:
    """`exact` and `near` are the group numbers of source and target, in this order."""
    total = len(paths)
    same, alike = (total - len(np.unique(group[:total])) for group in (exact, near))
    groups = [[paths[n] for n in group] for group in _groups(near[:total])]
    statement = f"Copies of another source image: {same} of {total} exactly, {alike - same} nearly"
    state = graded(alike / total, warning=COPIES)
    advice = f"Remove the copies ({LISTING}): a copy counts as another image."
    details = {"exact": same, "near": alike - same, "groups": groups}
    return Finding(state, "copies in the source", statement, advice if state != "ok" else "", details)


def contradictions(paths: Sequence[str], labels: Sequence[str], exact: np.ndarray, near: np.ndarray) -> Finding:
    """Copies of an image with different labels: at least one label is wrong."""
    total = len(paths)
    several = {
        kind: [members for members in _groups(group[:total]) if len({labels[n] for n in members}) > 1]
        for kind, group in (("exact", exact), ("near", near))
    }
    several["near"] = [members for members in several["near"] if len(set(exact[members])) > 1]
    details = {k: [{paths[n]: labels[n] for n in members} for members in groups] for k, groups in several.items()}
    contradicted = details["exact"] + details["near"]
    if not contradicted:
        return Finding("ok", "labels of copies", "No source image has two labels", details=details)
    images = {kind: sum(map(len, groups)) for kind, groups in several.items()}
    statement = (
        f"One image under two labels: {images['exact']} of {total} source images exactly, {images['near']} nearly, "
        f"such as {named(list(contradicted[0]))}"
    )
    state: Severity = "stop" if images["exact"] > CONTRADICTED * total else "warning"
    return Finding(state, "labels of copies", statement, f"Give each image one label ({LISTING}).", details)


def leak(source: Sequence[str], target: Sequence[str], exact: np.ndarray, near: np.ndarray) -> Finding:
    """Target images that are also in the source, with a label."""
    details: dict[str, list[dict[str, str]]] = {}
    listed: set[str] = set()
    for kind, group in (("exact", exact.tolist()), ("near", near.tolist())):
        originals = dict(zip(group[len(source) - 1 :: -1], source[::-1], strict=True))  # the first of each group
        copied = [(path, originals.get(number)) for path, number in zip(target, group[len(source) :], strict=True)]
        details[kind] = [{"target": path, "source": first} for path, first in copied if first and path not in listed]
        listed |= {pair["target"] for pair in details[kind]}
    leaked = details["exact"] + details["near"]
    if not leaked:
        return Finding("ok", "copies across domains", "No target image is also in the source", details=details)
    statement = (
        f"In the target and in the source too: {len(details['exact'])} of {len(target)} target images exactly, "
        f"{len(details['near'])} nearly, such as {leaked[0]['target']!r} and {leaked[0]['source']!r}"
    )
    state: Severity = "stop" if len(details["exact"]) > LEAKED * len(target) else "warning"
    advice = "Remove them from one of the two: a score on them says nothing about new images."
    return Finding(state, "copies across domains", statement, advice, details)


def blank_images(name: str, images: Traces) -> Finding:
    total = len(images.paths)
    spread = images.thumbnails.reshape(total, -1).std(axis=1)
    blank = [images.paths[n] for n in np.flatnonzero(spread < PLAIN).tolist()]
    subject, details = f"blank images, {name}", {"images": blank}
    if not blank:
        return Finding("ok", subject, f"No {name} image is nearly uniform", details=details)
    statement = f"Nearly uniform: {len(blank)} of {total} {name} images, {named(blank)}"
    state = graded(len(blank) / total, warning=BLANK, stop=MOSTLY_BLANK)
    advice = "Check them, and remove blank ones." if state != "ok" else ""
    return Finding(state, subject, statement, advice, details)


def colour(source: np.ndarray, target: np.ndarray) -> Finding:
    """Measured on the pixels, because greyscale images are often stored with three channels."""
    grey = [float((_tint(thumbnails) < COLOURLESS).mean()) for thumbnails in (source, target)]
    return _gap("greyscale", grey, "Convert both domains the same way: otherwise colour tells them apart.")


def _tint(thumbnails: np.ndarray) -> np.ndarray:
    """uint8 [N, side, side, 3] -> [N], the largest difference between the channels of a pixel. Channel by channel,
    because numpy is slow along an axis of three."""
    red, green, blue = np.moveaxis(thumbnails, 3, 0)
    most, least = np.maximum(np.maximum(red, green), blue), np.minimum(np.minimum(red, green), blue)
    tint: np.ndarray = (most - least).max(axis=(1, 2))
    return tint


def transparency(source: Sequence[Header], target: Sequence[Header]) -> Finding:
    alpha = [float(np.mean([h.alpha for h in headers])) for headers in (source, target)]
    return _gap("transparency", alpha, "Give both domains similar backgrounds: transparent parts become white.")


def image_sizes(name: str, paths: Sequence[str], headers: Sequence[Header], crop: int) -> Finding:
    """The sizes of the files, before images are resized to a square."""
    sides = np.array([(h.width, h.height) for h in headers])  # [N, 2]
    tiny = sides.min(axis=1) * ENLARGED < crop
    thin = sides.max(axis=1) > STRETCHED * sides.min(axis=1)
    details: dict[str, Any] = {
        "median": np.median(sides, axis=0).astype(int).tolist(),
        "tiny": [paths[n] for n in np.flatnonzero(tiny).tolist()],
        "thin": [paths[n] for n in np.flatnonzero(thin).tolist()],
    }
    statement = (
        f"Half of the {name} images have {details['median'][0]} x {details['median'][1]} pixels or more; with a side "
        f"below {crop / ENLARGED:.3g}: {tiny.sum()}; with one side over {STRETCHED:.3g} times the other: {thin.sum()}"
    )
    state = graded(float((tiny | thin).mean()), warning=ODD)
    cures = ((tiny, "Use larger originals of the small ones."), (thin, "Crop the long ones to their content."))
    advice = " ".join(cure for odd, cure in cures if odd.any()) if state != "ok" else ""
    return Finding(state, f"image sizes, {name}", statement, advice, details)


def layout(warnings: Sequence[tuple[str, str]]) -> Finding:
    """The warnings of the scan of the source, each (problem, advice)."""
    if not warnings:
        return Finding("ok", "source layout", "Every image belongs to a class")
    problems, advice = zip(*warnings, strict=True)
    return Finding("warning", "source layout", ". ".join(problems), " ".join(advice))


def _gap(subject: str, shares: Sequence[float], advice: str) -> Finding:
    statement = f"{subject.capitalize()}: {shares[0]:.0%} of the source, {shares[1]:.0%} of the target"
    state: Severity = graded(abs(shares[0] - shares[1]), warning=GAP)
    details = {"source": shares[0], "target": shares[1]}
    return Finding(state, subject, statement, advice if state != "ok" else "", details)


def _groups(group: np.ndarray) -> list[list[int]]:
    """The members of each group of more than one image."""
    order = np.argsort(group, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(group[order])) + 1)
    return [part.tolist() for part in parts if len(part) > 1]
