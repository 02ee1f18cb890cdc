"""What is wrong with these two sets of images, before an hour is spent: everything that needs no model.

`examine` works on what decoding leaves behind (digests and thumbnails), so that `adapt` can afford it every time. The
target is looked at as pictures alone: nothing here can ask for a label of it.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cdtrans.data.images import Header
from cdtrans.errors import NAMED, named
from cdtrans.trust.duplicates import PLAIN, exact_groups, near_groups
from cdtrans.trust.findings import LISTED, Finding, State, graded

FEW = 5  # images of a class; below it there is not one for each part of a five-fold check, and little to learn from
BALANCE = 10.0  # largest class to smallest; Office-31 has 4.4 at most, and the losses do not make up for it
COPIES = 0.1  # of the source: what is there twice counts twice, and beyond a tenth that shows
CONTRADICTED = 0.25  # of the source: then at least every eighth label is wrong, more than any real set is known for
LEAKED = 0.5  # of the target: then most of it has its label in the source, and there is no second domain
BLANK, MOSTLY_BLANK = 0.01, 0.5  # of a domain; blank images are usually a failed export, and come in numbers
COLOURLESS = 4  # grey levels between the channels of a thumbnail; JPEG adds about one to a greyscale picture
GAP = 0.25  # between the domains' shares; a quarter more of one kind is a difference that a model can learn instead
ENLARGED = 4.0  # times: an image this much smaller than the model's is mostly invented by the resize
STRETCHED = 4.0  # width to height or height to width: both sides are resized to one length
ODD = 0.05  # of a domain, the share of odd sizes that is worth a warning
LISTED_CLASSES = 12  # as many as a line can hold


class Pictures(NamedTuple):
    """A domain's readable images, as far as they are needed here."""

    paths: Sequence[str]
    digests: Sequence[str]
    thumbnails: np.ndarray  # uint8 [N, side, side, 3]


class Labels(NamedTuple):
    """What the source has and the target has not."""

    of: np.ndarray  # [N] an index into classes
    classes: Sequence[str]

    def counts(self) -> dict[str, int]:
        return dict(zip(self.classes, np.bincount(self.of, minlength=len(self.classes)).tolist(), strict=True))


def examine(source: Pictures, labels: Labels, target: Pictures) -> list[Finding]:
    """The findings on readable images that `check` and `adapt` share."""
    return [
        class_sizes(labels),
        class_balance(labels),
        target_size(labels, target),
        *copies(source, labels, target),
        blank_images("source", source.paths, source.thumbnails),
        blank_images("target", target.paths, target.thumbnails),
        colour(source.thumbnails, target.thumbnails),
    ]


def unreadable(name: str, bad: Mapping[str, str], total: int, max_bad: float) -> Finding:
    """`adapt` has the same limit, and raises its own error."""
    subject, details = f"{name} files", {"files": total, "unreadable": dict(bad)}
    if not bad:
        return Finding("ok", subject, f"All {total} can be read", details=details)
    first = "; ".join(f"{path!r}, {cause}" for path, cause in list(bad.items())[:NAMED])
    more = f"; and {len(bad) - NAMED} more" if len(bad) > NAMED else ""
    found = f"{len(bad)} of {total} {name} files cannot be read: {first}{more}"
    state = "stop" if len(bad) == total else graded(len(bad) / total, warning=0.0, stop=max_bad)
    return Finding(state, subject, found, "Repair or remove them; a run skips them.", details)


def ignored(name: str, paths: Sequence[str]) -> Finding:
    """Files that are left out for their endings, which nobody would miss until an hour later. `name` is the domain's,
    if they are of one."""
    subject, details = f"ignored files, {name}", {"files": list(paths)}
    if not paths:
        return Finding("ok", subject, f"No {name} file is left out for its ending", details=details)
    endings = Counter(os.path.splitext(path)[1].lower() for path in paths).most_common()
    listed = ", ".join(f"{count} {repr(ending) if ending else 'without'}" for ending, count in endings[:NAMED])
    more = ", ..." if len(endings) > NAMED else ""
    files = f"{name} file{'s' if len(paths) > 1 else ''}".lstrip()
    found = f"Ignored because of the ending: {len(paths)} {files} ({listed}{more}), {named(paths)}"
    advice = "If they are images, convert them (HEIC and AVIF too) to JPEG or PNG, or rename those that already are."
    return Finding("warning", subject, found, advice, details)


def class_sizes(labels: Labels) -> Finding:
    """Images per class, of those that can be read."""
    counts = labels.counts()
    details = {"images": counts}
    empty = [name for name, count in counts.items() if count == 0]
    few = [name for name, count in counts.items() if count < FEW]
    if empty:
        found = f"No readable image is left of {_classes(len(empty))} of the source: {named(empty)}"
        return Finding("stop", "classes", found, "Repair or remove the class.", details)
    if few:
        have = "has" if len(few) == 1 else "have"
        found = f"{_classes(len(few))} {have} fewer than {FEW} source images: {named(few)}"
        return Finding("warning", "classes", found, "Add images, or leave such classes out.", details)
    if len(counts) <= LISTED_CLASSES:
        found = f"{len(counts)} classes: " + ", ".join(f"{name!r} {count}" for name, count in counts.items())
    else:
        found = f"{len(counts)} classes of {min(counts.values())} to {max(counts.values())} images"
    return Finding("ok", "classes", found, details=details)


def class_balance(labels: Labels) -> Finding:
    counts = {name: count for name, count in labels.counts().items() if count}
    least, most = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
    ratio = counts[most] / counts[least]
    found = "The source classes have equally many images"
    if ratio > 1:
        found = f"The largest source class, {most!r}, has {ratio:.3g} times the images of the smallest, {least!r}"
    advice = "Add images of the small classes, or take fewer of the large ones: the model will lean towards these."
    state = graded(ratio, warning=BALANCE)
    return Finding(state, "balance", found, advice if state != "ok" else "", {"largest_to_smallest": ratio})


def target_size(labels: Labels, target: Pictures) -> Finding:
    distinct, classes = len(set(target.digests)), len(labels.classes)
    details = {"images": len(target.digests), "distinct": distinct}
    if distinct < classes:
        found = f"The target has {distinct} different images for {classes} classes"
        return Finding("warning", "target size", found, "Add target images: some classes cannot be there.", details)
    return Finding("ok", "target size", f"The target has {distinct} different images", details=details)


def copies(source: Pictures, labels: Labels, target: Pictures) -> list[Finding]:
    """The same picture more than once: in the source, under two labels, on both sides."""
    digests = [*source.digests, *target.digests]
    exact = exact_groups(digests)
    near = near_groups(digests, np.concatenate([source.thumbnails, target.thumbnails]))
    return [
        copies_in_source(source.paths, exact, near),
        contradictions(source.paths, labels, exact, near),
        leak(source.paths, target.paths, exact, near),
    ]


def copies_in_source(paths: Sequence[str], exact: np.ndarray, near: np.ndarray) -> Finding:
    """`exact` and `near` are the group numbers of source and target, in this order."""
    total = len(paths)
    same, alike = (total - len(np.unique(group[:total])) for group in (exact, near))
    groups = [[paths[n] for n in group] for group in _groups(near[:total])]
    found = f"Copies of another source image: {same} of {total} exactly, {alike - same} nearly"
    state = graded(alike / total, warning=COPIES)
    advice = f"Remove the copies ({LISTED}): they count as often as they are there."
    details = {"exact": same, "near": alike - same, "groups": groups}
    return Finding(state, "copies in the source", found, advice if state != "ok" else "", details)


def contradictions(paths: Sequence[str], labels: Labels, exact: np.ndarray, near: np.ndarray) -> Finding:
    """One picture, two labels: at least one is wrong."""
    total = len(paths)
    details: dict[str, list[dict[str, str]]] = {"exact": [], "near": []}
    images = {"exact": 0, "near": 0}
    for kind, group in (("exact", exact[:total]), ("near", near[:total])):
        for members in _groups(group):
            if len(set(labels.of[members])) > 1 and (kind == "exact" or len(set(exact[members])) > 1):
                details[kind].append({paths[n]: labels.classes[labels.of[n]] for n in members})
                images[kind] += len(members)
    contradicted = details["exact"] + details["near"]
    if not contradicted:
        return Finding("ok", "labels of copies", "No picture of the source has two labels", details=details)
    found = (
        f"One picture under two labels: {images['exact']} of {total} source images exactly, {images['near']} nearly, "
        f"such as {named(list(contradicted[0]))}"
    )
    state: State = "stop" if images["exact"] > CONTRADICTED * total else "warning"
    return Finding(state, "labels of copies", found, f"Give each picture one label ({LISTED}).", details)


def leak(source: Sequence[str], target: Sequence[str], exact: np.ndarray, near: np.ndarray) -> Finding:
    """Target images whose label lies in the source."""
    total = len(source)
    details: dict[str, list[dict[str, str]]] = {"exact": [], "near": []}
    for kind, group in (("exact", exact), ("near", near)):
        originals = {number: source[n] for n, number in reversed(list(enumerate(group[:total].tolist())))}
        known = {pair["target"] for pair in details["exact"]}
        for path, number in zip(target, group[total:].tolist(), strict=True):
            if number in originals and path not in known:
                details[kind].append({"target": path, "source": originals[number]})
    leaked = details["exact"] + details["near"]
    if not leaked:
        return Finding("ok", "copies across domains", "No target image is also in the source", details=details)
    found = (
        f"In the target and in the source too: {len(details['exact'])} of {len(target)} target images exactly, "
        f"{len(details['near'])} nearly, such as {leaked[0]['target']!r} and {leaked[0]['source']!r}"
    )
    state: State = "stop" if len(details["exact"]) > LEAKED * len(target) else "warning"
    advice = "Take them out of one of the two: a score on them says nothing about new images."
    return Finding(state, "copies across domains", found, advice, details)


def blank_images(name: str, paths: Sequence[str], thumbnails: np.ndarray) -> Finding:
    spread = thumbnails.reshape(len(thumbnails), -1).std(axis=1)
    blank = [paths[n] for n in np.flatnonzero(spread < PLAIN).tolist()]
    subject, details = f"blank images, {name}", {"images": blank}
    if not blank:
        return Finding("ok", subject, f"No {name} image is of almost one colour", details=details)
    found = f"Of almost one colour: {len(blank)} of {len(paths)} {name} images, {named(blank)}"
    state = graded(len(blank) / len(paths), warning=BLANK, stop=MOSTLY_BLANK)
    advice = "Look at them, and remove what shows nothing." if state != "ok" else ""
    return Finding(state, subject, found, advice, details)


def colour(source: np.ndarray, target: np.ndarray) -> Finding:
    """By the pixels, because a greyscale picture is often stored in three channels."""
    grey = [float((_tint(thumbnails) < COLOURLESS).mean()) for thumbnails in (source, target)]
    return _gap("greyscale", grey, "Convert both domains alike: else colour tells them apart.")


def _tint(thumbnails: np.ndarray) -> np.ndarray:
    """uint8 [N, side, side, 3] -> [N], the largest difference between the channels of a pixel. Numpy is slow along an
    axis of three, so channel by channel."""
    red, green, blue = np.moveaxis(thumbnails, 3, 0)
    most, least = np.maximum(np.maximum(red, green), blue), np.minimum(np.minimum(red, green), blue)
    tint: np.ndarray = (most - least).max(axis=(1, 2))
    return tint


def transparency(source: Sequence[Header], target: Sequence[Header]) -> Finding:
    alpha = [float(np.mean([h.alpha for h in headers])) for headers in (source, target)]
    return _gap("transparency", alpha, "Give both domains like backgrounds: transparent parts become white.")


def image_sizes(name: str, paths: Sequence[str], headers: Sequence[Header], crop: int) -> Finding:
    """Files as they lie on the disk, before they are made square."""
    sides = np.array([(h.width, h.height) for h in headers])  # [N, 2]
    tiny = sides.min(axis=1) * ENLARGED < crop
    thin = sides.max(axis=1) > STRETCHED * sides.min(axis=1)
    details: dict[str, Any] = {
        "median": np.median(sides, axis=0).astype(int).tolist(),
        "tiny": [paths[n] for n in np.flatnonzero(tiny).tolist()],
        "thin": [paths[n] for n in np.flatnonzero(thin).tolist()],
    }
    found = (
        f"Half of the {name} images have {details['median'][0]} x {details['median'][1]} pixels or more; with a side "
        f"below {crop / ENLARGED:.3g}: {tiny.sum()}; with one side over {STRETCHED:.3g} times the other: {thin.sum()}"
    )
    state = graded(float((tiny | thin).mean()), warning=ODD)
    cures = ((tiny, "Take larger originals of the small ones."), (thin, "Cut the long ones to what they show."))
    advice = " ".join(cure for odd, cure in cures if odd.any()) if state != "ok" else ""
    return Finding(state, f"image sizes, {name}", found, advice, details)


def layout(warnings: Sequence[tuple[str, str]]) -> Finding:
    """What the scan of the source has to say: what was found, and what to do."""
    if not warnings:
        return Finding("ok", "source layout", "Every image found is of a class")
    found, advice = zip(*warnings, strict=True)
    return Finding("warning", "source layout", ". ".join(found), " ".join(advice))


def _gap(subject: str, shares: Sequence[float], advice: str) -> Finding:
    found = f"{subject.capitalize()}: {shares[0]:.0%} of the source, {shares[1]:.0%} of the target"
    state: State = graded(abs(shares[0] - shares[1]), warning=GAP)
    details = {"source": shares[0], "target": shares[1]}
    return Finding(state, subject, found, advice if state != "ok" else "", details)


def _groups(group: np.ndarray) -> list[list[int]]:
    """The members of each group of more than one image."""
    order = np.argsort(group, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(group[order])) + 1)
    return [part.tolist() for part in parts if len(part) > 1]


def _classes(count: int) -> str:
    return "1 class" if count == 1 else f"{count} classes"
