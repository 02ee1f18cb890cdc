"""Ask a person about the target of a finished run: which classes occur, which images belong to none, and what some
images show, a random part to measure with and an informative part to train on. Write the files to answer in."""

import hashlib
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import quoteattr

import numpy as np
from PIL import Image

from cdtrans.errors import DataError, counted
from cdtrans.inputs.images import UnreadableImage, decode
from cdtrans.measure.intervals import strata, strata_for, wilson
from cdtrans.measure.labels import (
    BELONGS,
    CLASS_OCCURS,
    GROUP,
    LABEL_COLUMNS,
    ONE_CLASS,
    UNSURE,
    LabelsByImage,
    read_rows,
    require_clear,
)
from cdtrans.measure.matching import FileAnswers, RunTarget, find, read_target, require_untrained
from cdtrans.measure.measured import answers_so_far, asked_parts
from cdtrans.record import layout
from cdtrans.record.files import atomic, csv_lines
from cdtrans.record.outcome import NO_CLASS, Part, Question, Questions
from cdtrans.record.record import RunRecord
from cdtrans.record.run import require_output, rewrite
from cdtrans.reporting.images import jpeg
from cdtrans.reporting.page import templates
from cdtrans.runtime.ranks import processor_count
from cdtrans.runtime.screen import Screen

PAGE, LABELS, TASKS, LABELLING_CONFIG = "ask.html", "labels.csv", "label-studio.json", "label-studio.xml"
# Thirty labels of fifty give an interval about 20 points wide; it narrows only with the square root, while the images
# that the model is least sure of teach it most.
RANDOM_SHARE = 0.6
LIKELY = 0.7  # accuracy that the interval of labels to come is said for
# Doubt below which a class may be skipped: none of 1,056 absent classes was below it on Office-31, PACS and Office-Home
# (docs/results/classsets.md); 4 were below 0.15.
SURE = 0.05
EXAMPLES = 2  # source images shown of a class
BELONGING = 24  # images that are asked about on page 2; twice as many place the cut no better
FLOOR = 1.05  # the weight of an image in k-means is FLOOR - its largest probability
KMEANS = {"n_init": 2, "max_iter": 50, "random_state": 0}
TIE = 1e-9  # smaller than any difference between two shares; breaks ties at random
IMAGE_SIDE, SMALL_SIDE = 480, 160  # pixels of the longer side of an image on the page; small: among others of its class


@dataclass(frozen=True)
class Asked:
    """The questions, in the order of the page, and where the files are."""

    run: Path
    folder: Path
    classes: tuple[int, ...]  # page 1: numbers of the classes, the most doubtful first
    belongs: tuple[int, ...]  # page 2: indices of images in the target
    parts: dict[int, Part]  # page 3: part of each image, by its index in the target

    def count(self, part: Part) -> int:
        return sum(each == part for each in self.parts.values())

    def summary(self) -> dict[str, Any]:
        """The promised keys of `ask --json`."""
        return {
            "run": str(self.run),
            "page": str(self.folder / PAGE),
            "labels": str(self.folder / LABELS),
            "classes": len(self.classes),
            "belonging": len(self.belongs),
            "images": len(self.parts),
            "random": self.count("random"),
            "informative": self.count("informative"),
        }


def ask_about(record: RunRecord, folder: Path | None, screen: Screen, *, budget: int, seed: int, force: bool) -> Asked:
    """Write a page, a CSV and a Label Studio file with questions about the target of a finished run. What has been
    answered is not asked again."""
    target = read_target(record)
    require_untrained(target)
    require_clear(target.classes)
    folder = folder or (record.folder / layout.QUESTIONS.name).parent
    for name in (PAGE, LABELS, TASKS, LABELLING_CONFIG):
        require_output(folder / name, "questions", "--out")
    known = answers_so_far(target)
    if not force:
        refuse_to_lose(folder / LABELS, target, known)
    chosen = choose_images(target, known.labels, budget, seed)
    new = {i: part for i, part in chosen.items() if i not in known.labels}
    announce_interval([*new.values()], screen)
    classes, unclear = choose_classes(target, known), choose_belonging(target, known, seed)
    views, paths = record.views, record.images.paths
    shown = {k: (typical_images(views, k), views.candidates[k].tolist()) for k in classes}
    of_source = [(paths["source"][i], SMALL_SIDE) for source, _ in shown.values() for i in source]
    of_target = [(paths["target"][i], SMALL_SIDE) for _, candidates in shown.values() for i in candidates]
    of_target += [(target.paths[i], IMAGE_SIDE) for i in (*unclear, *new)]
    if not of_target:
        raise DataError(
            "nothing-to-ask", f"All {len(target)} images of the target have been answered; there is nothing to ask."
        )
    images = read_images(target.root, of_target, screen)
    examples = read_images(record.root("source"), of_source, screen)
    if not images:
        raise DataError(
            "no-readable-image",
            f"No image of the target in '{target.root}' can be read; put the target back, or run this in the folder "
            "where 'cdtrans adapt' was run.",
        )
    sheets = [
        {
            "name": target.classes[k],
            "source": [x for i in source if (x := examples.get((paths["source"][i], SMALL_SIDE)))],
            "target": [x for i in candidates if (x := images.get((paths["target"][i], SMALL_SIDE)))],
            "sure": bool(views.doubt[k] < SURE),
        }
        for k, (source, candidates) in shown.items()
    ]
    large = {i: images[place] for i in (*unclear, *new) if (place := (target.paths[i], IMAGE_SIDE)) in images}
    belongs, asked_for = tuple(i for i in unclear if i in large), {i: part for i, part in new.items() if i in large}
    asked = Asked(record.folder, folder, tuple(classes), belongs, asked_for)
    write_files(asked, target, sheets, large)
    parts = asked_parts(target) | {i: part for i, part in chosen.items() if i in large or i in known.labels}
    questions = tuple(Question(target.paths[i], target.digests[i], part) for i, part in parts.items())
    rewrite(record.folder, layout.QUESTIONS, Questions(questions))
    return asked


def announce_interval(parts: list[Part], screen: Screen) -> None:
    """Say how many of the images measure the accuracy, and how well."""
    if drawn := parts.count("random"):
        interval = wilson(round(LIKELY * drawn), drawn)
        images, points = counted(len(parts), "image"), 50 * (interval.high - interval.low)
        screen.say(f"{drawn} of {images} to label measure the accuracy: expect about +/- {points:.0f} points.")


def refuse_to_lose(file: Path, target: RunTarget, known: FileAnswers) -> None:
    """An error if the file holds answers that the run has neither read with `answer` nor been trained with."""
    lost = 0
    for row in filter(lambda row: row.answered, read_rows(file) if file.exists() else ()):
        if row.about_class:
            lost += known.occurs.get(row.label) != (row.part == CLASS_OCCURS)
            continue
        index, trained_as = find(row, file, target)
        if index is not None:
            entry = {BELONGS: known.belongs, GROUP: known.groups}.get(row.part, known.labels).get(index)
            lost += entry is None or row.label != entry.label
        elif row.part != BELONGS or trained_as is None:  # a label that the run was trained with says more
            lost += row.label != trained_as
    if lost:
        advice = f"read them with 'cdtrans answer {target.record.folder} {file}', give another --out, or use --force"
        holds = f"'{file}' holds {counted(lost, 'label')} that would be lost"
        raise DataError("labels-lost", f"{holds}: {advice} to replace them.")


def choose_classes(target: RunTarget, known: FileAnswers) -> list[int]:
    """The classes that nobody has said anything of, the most doubtful first."""
    views = target.record.views
    if target.record.outcome.class_set.by in ("told", "asked") or not views.candidates.size:
        return []
    return [k for k in np.argsort(-views.doubt, kind="stable").tolist() if target.classes[k] not in known.occurs]


def choose_belonging(target: RunTarget, known: FileAnswers, seed: int) -> list[int]:
    """Images at equal steps of the rank of the score, in random order, so that stopping half-way leaves even steps."""
    found, ranked = target.record.outcome.class_set, np.argsort(target.no_class, kind="stable")
    if found.curve or found.others is False:
        return []
    steps = np.linspace(0, len(ranked) - 1, min(BELONGING, len(ranked))).round().astype(int)
    return [i for i in np.random.default_rng(seed).permutation(ranked[steps]).tolist() if i not in known.belongs]


def typical_images(views: layout.Views, k: int) -> list[int]:
    """Source images of a class: those nearest to its mean, if their features are known."""
    images = np.flatnonzero(views.source_labels == k)
    sampled = np.flatnonzero(views.source_labels[views.sampled_source] == k)
    if len(sampled) >= EXAMPLES:
        x = views.before_source[sampled].astype(np.float32)
        images = views.sampled_source[sampled[np.linalg.norm(x - x.mean(axis=0), axis=1).argsort(kind="stable")]]
    return [int(i) for i in images[:EXAMPLES]]


def choose_images(target: RunTarget, labels: LabelsByImage, budget: int, seed: int) -> dict[int, Part]:
    """The part of at most `budget` new images, in random order, so that stopping half-way leaves a random half
    labelled. Images that have a label and are now drawn for the random part come in addition: they need not be labelled
    again."""
    rng = np.random.default_rng(seed)
    left = len(target) - len(labels)
    new: list[tuple[int, Part]]
    if budget >= left:
        new = [(i, "random") for i in range(len(target)) if i not in labels or labels[i].part != "random"]
    else:
        measured = np.array([i for i, label in labels.items() if label.part == "random"], dtype=np.int64)
        wanted = max(1, round(RANDOM_SHARE * budget))
        drawn = draw_random(target.confidence, wanted, measured, rng).tolist()
        informative = draw_informative(target, budget - wanted, {*labels, *drawn})
        new = [*((i, "random") for i in drawn), *((i, "informative") for i in informative)]
    return dict(new[i] for i in rng.permutation(len(new)))


def draw_random(score: np.ndarray, count: int, drawn: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """`count` images at random, equally many from every stratum of the score (see intervals.py), so that each image
    has the same chance. `drawn` are images that were drawn before: they are left out, and count for their stratum."""
    strata_count = strata_for(len(drawn) + count)
    stratum = strata(score, strata_count)
    free = np.ones(len(score), dtype=bool)
    free[drawn] = False
    size, taken = np.bincount(stratum, minlength=strata_count), np.bincount(stratum[drawn], minlength=strata_count)
    quota = np.zeros(strata_count, dtype=np.int64)
    for _ in range(min(count, int(free.sum()))):
        share = np.where(taken + quota < size, (taken + quota) / size, np.inf)
        quota[np.argmin(share + TIE * rng.random(strata_count))] += 1
    members = [np.flatnonzero((stratum == h) & free) for h in range(strata_count)]
    return np.concatenate([rng.choice(m, n, replace=False) for m, n in zip(members, quota, strict=True)])


def draw_informative(target: RunTarget, count: int, closed: set[int]) -> list[int]:
    """Images that are doubtful and typical at once: the medoids of k-means of the target's features, weighted by the
    doubt in each image. On three data sets half as many teach as much as random ones (docs/results/classsets.md)."""
    from sklearn.cluster import KMeans

    views, chosen_model = target.record.views, target.record.outcome.choice.model
    features = views.before_target if chosen_model == "source" else views.after_target
    free = np.isin(views.sampled_target, np.delete(target.rows, list(closed)))
    indices = np.searchsorted(target.rows, views.sampled_target[free])
    if not len(indices) or not count:
        return []
    x = features[free].astype(np.float64)
    x /= np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
    means = KMeans(min(count, len(x)), **KMEANS).fit(x, sample_weight=FLOOR - target.confidence[indices])
    return [*dict.fromkeys(indices[means.transform(x).argmin(axis=0)].tolist())]  # one for several equal centres


def read_images(root: Path, wanted: Iterable[tuple[str, int]], screen: Screen) -> dict[tuple[str, int], str]:
    """Images as data URLs, by path and longer side, at their own proportions. Files that cannot be read any more are
    left out."""
    wanted = list(dict.fromkeys(wanted))
    images, missing = {}, []

    def read(path: str, side: int) -> str | UnreadableImage:
        try:
            image = decode(root / path)
        except UnreadableImage as error:
            return error
        image.thumbnail((side, side), Image.Resampling.LANCZOS)
        return jpeg(image)

    with screen.track("images", len(wanted)) as task, ThreadPoolExecutor(processor_count()) as pool:
        for place, found in zip(wanted, pool.map(read, *zip(*wanted, strict=True)) if wanted else (), strict=True):
            if isinstance(found, str):
                images[place] = found
            else:
                missing.append((place[0], str(found)))
            task.advance(1)
    if missing:
        path, cause = missing[0]
        where = f"in '{root}' (the first: {path!r}, {cause})"
        screen.warn(f"{len(missing)} of {len(wanted)} chosen images cannot be read {where}; they are skipped.")
    return images


def write_files(asked: Asked, target: RunTarget, sheets: list[dict[str, Any]], images: dict[int, str]) -> None:
    """The files for answering. Questions about single images do not hold predictions, and the page does not show the
    parts: both would bias."""

    def task(index: int, part: str) -> dict[str, str]:
        return {"path": target.paths[index], "digest": target.digests[index], "part": part, "image": images[index]}

    belongs, tasks = [task(i, BELONGS) for i in asked.belongs], [task(i, part) for i, part in asked.parts.items()]
    others = [UNSURE, NO_CLASS]
    asked_for = [target.classes, *asked.classes, *(each["digest"] for each in (*belongs, *tasks))]
    store = hashlib.sha256(repr(asked_for).encode()).hexdigest()[:16]  # where the browser keeps the answers so far
    page: dict[str, Any] = {"store": store, "classes": target.classes, "others": [*others, ONE_CLASS]}
    page |= {"occurs": sheets, "belongs": belongs, "images": tasks}
    template = templates("measure").get_template("page.html")
    texts = {
        PAGE: template.render(data=page, run=str(target.record.folder)),
        TASKS: json.dumps([{"data": task} for task in tasks], indent=1) + "\n",
        LABELLING_CONFIG: labelling_config((*target.classes, *others)),
    }
    contents = {name: text.encode("utf-8", "backslashreplace") for name, text in texts.items()}
    rows = [("", sheet["name"], "") for sheet in sheets]  # filled in by hand: occurs or absent as the part
    rows += [(each["path"], "", each["part"]) for each in (*belongs, *tasks)]
    contents[LABELS] = csv_lines([LABEL_COLUMNS, *rows])
    for name, content in contents.items():
        with atomic(asked.folder / name) as file:
            file.write(content)


def labelling_config(names: tuple[str, ...]) -> str:
    """Label Studio's labelling interface for the tasks. It gives back every name as it is, whatever characters it has,
    which a template would make visible."""
    choices = "".join(f"    <Choice value={quoteattr(name)}/>\n" for name in names)
    image = '  <Image name="image" value="$image"/>\n'
    return f'<View>\n{image}  <Choices name="label" toName="image" choice="single">\n{choices}  </Choices>\n</View>\n'
