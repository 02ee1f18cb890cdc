"""Choose target images to label, a random part to measure with and an informative part to train on, and write the files
to label them in."""

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from PIL import Image

from cdtrans.config import RunFolder
from cdtrans.errors import DataError, counted
from cdtrans.inputs.images import UnreadableImage, decode
from cdtrans.measure.intervals import strata, strata_for
from cdtrans.measure.labels import LABEL_COLUMNS, UNSURE, LabelsByImage, read_rows, require_clear
from cdtrans.measure.matching import RunTarget, find, read_target, require_untrained
from cdtrans.measure.measured import asked_parts, labels_so_far
from cdtrans.record import layout
from cdtrans.record.files import atomic, csv_lines
from cdtrans.record.outcome import NO_CLASS, Part, Question, Questions
from cdtrans.record.record import RunRecord
from cdtrans.record.run import require_output, rewrite
from cdtrans.reporting.images import jpeg
from cdtrans.reporting.page import templates
from cdtrans.runtime.screen import Screen
from cdtrans.schema import Help, Range, checked

PAGE, LABELS, TASKS, LABELLING_CONFIG = "ask.html", "labels.csv", "label-studio.json", "label-studio.xml"
# Thirty labels of fifty give an interval about 20 points wide; it narrows only with the square root, while the images
# that the model is least sure of teach it most.
RANDOM_SHARE = 0.6
CANDIDATES = 10  # the informative part is chosen among this many times as many of the least certain images
TIE = 1e-9  # smaller than any difference between two shares; breaks ties at random
IMAGE_SIDE = 480  # pixels of the longer side of an image on the page


@dataclass(frozen=True)
class Asked:
    """The images to label, in the order of the page, and where the files are."""

    folder: Path
    parts: dict[int, Part]  # part of each image, by its index in the target

    def count(self, part: Part) -> int:
        return sum(each == part for each in self.parts.values())

    def summary(self) -> dict[str, Any]:
        """The promised keys of `ask --json`."""
        return {
            "page": str(self.folder / PAGE),
            "labels": str(self.folder / LABELS),
            "images": len(self.parts),
            "random": self.count("random"),
            "informative": self.count("informative"),
        }


@checked()
def ask(
    run: RunFolder,
    *,
    budget: Annotated[int, Help("How many images to label."), Range(minimum=1)] = 50,
    out: Annotated[str | Path | None, Help("Folder for the page and the files (default: RUN/ask).")] = None,
    seed: Annotated[int, Help("Seed of the random part."), Range(minimum=0)] = 0,
    force: Annotated[bool, Help("Replace labels that 'answer' has not read.")] = False,
    screen: Screen | None = None,
) -> Asked:
    """Write a labelling page, a CSV and a Label Studio file with `budget` target images of a finished run. Images that
    have a label are not asked again."""
    screen, record = screen or Screen(quiet=True), RunRecord(Path(run))
    target = read_target(record)
    require_untrained(target)
    require_clear(target.classes)
    folder = Path(out) if out else (record.folder / layout.QUESTIONS.name).parent
    for name in (PAGE, LABELS, TASKS, LABELLING_CONFIG):
        require_output(folder / name, "questions", "--out")
    labels = labels_so_far(target)
    if not force:
        refuse_to_lose(folder / LABELS, target, labels)
    chosen = choose_images(target, labels, budget, seed)
    images = read_images(target, [i for i in chosen if i not in labels], screen)
    if not images:
        raise DataError(
            "nothing-to-ask", f"All {len(target)} images of the target have been answered; there is nothing to ask."
        )
    asked = {i: part for i, part in chosen.items() if i in images}
    write_files(folder, target, asked, images)
    parts = asked_parts(target) | {i: part for i, part in chosen.items() if i in images or i in labels}
    questions = tuple(Question(target.paths[i], target.digests[i], part) for i, part in parts.items())
    rewrite(record.folder, layout.QUESTIONS, Questions(questions))
    return Asked(folder, asked)


def refuse_to_lose(file: Path, target: RunTarget, labels: LabelsByImage) -> None:
    """An error if the file holds labels that the run has neither read with `answer` nor been trained with."""
    if not file.exists():
        return
    lost = 0
    for row in filter(lambda row: row.label, read_rows(file)):
        index, trained_as = find(row, file, target)
        known = trained_as if index is None else labels[index].label if index in labels else None
        lost += row.label != known
    if lost:
        advice = f"read them with 'cdtrans answer {target.record.folder} {file}', give another --out, or use --force"
        holds = f"'{file}' holds {counted(lost, 'label')} that would be lost"
        raise DataError("labels-lost", f"{holds}: {advice} to replace them.")


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
    """The images that the model is least sure of, spread over its predicted classes and over the features. The next
    image is of the class with the fewest so far, and as far as possible from the chosen ones."""
    views, chosen_model = target.record.views, target.record.outcome.choice.model
    usable = np.isin(views.sampled_target, target.rows)
    sampled = np.searchsorted(target.rows, views.sampled_target[usable])  # [S] images with features
    features = (views.before_target if chosen_model == "source" else views.after_target)[usable].astype(np.float32)
    features /= np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)
    predicted = target.predicted[chosen_model][sampled].tolist()
    rows = [row for row, index in enumerate(sampled.tolist()) if index not in closed]
    rows.sort(key=lambda row: target.confidence[sampled[row]])
    rows = rows[: CANDIDATES * count]
    distance = np.ones(len(sampled))  # to the nearest chosen image
    chosen: list[int] = []
    of_class: Counter[int] = Counter()
    for _ in range(min(count, len(rows))):
        best = min(rows, key=lambda row: (of_class[predicted[row]], -distance[row]))
        rows.remove(best)
        chosen.append(int(sampled[best]))
        of_class[predicted[best]] += 1
        distance = np.minimum(distance, 1 - features @ features[best])
    return chosen


def read_images(target: RunTarget, indices: list[int], screen: Screen) -> dict[int, str]:
    """The images as data URLs, at their own proportions. Files that cannot be read any more are left out."""
    images, missing = {}, []
    with screen.track("images", len(indices)) as task:
        for index in indices:
            try:
                image = decode(target.root / target.paths[index])
            except UnreadableImage as error:
                missing.append((target.paths[index], str(error)))
            else:
                image.thumbnail((IMAGE_SIDE, IMAGE_SIDE), Image.Resampling.LANCZOS)
                images[index] = jpeg(image)
            task.advance(1)
    if missing:
        path, cause = missing[0]
        where = f"in '{target.root}' (the first: {path!r}, {cause})"
        problem = f"{len(missing)} of {len(indices)} chosen images cannot be read {where}"
        if not images:
            raise DataError(
                "no-readable-image",
                f"{problem}; put the target back, or run this in the folder where 'cdtrans adapt' was run.",
            )
        screen.warn(f"{problem}; they are skipped.")
    return images


def write_files(folder: Path, target: RunTarget, asked: dict[int, Part], images: dict[int, str]) -> None:
    """The files for labelling. They do not hold predictions, and the page does not show the parts: both would bias."""
    tasks = [
        {"path": target.paths[i], "digest": target.digests[i], "part": part, "image": images[i]}
        for i, part in asked.items()
    ]
    others = [UNSURE, NO_CLASS]
    asked_for = repr([target.classes, *(task["digest"] for task in tasks)])
    store = hashlib.sha256(asked_for.encode()).hexdigest()[:16]  # where the browser keeps the answers so far
    page = {"store": store, "classes": target.classes, "others": others, "images": tasks}
    texts = {
        PAGE: template_text("page.html", data=page, run=str(target.record.folder), count=len(tasks)),
        TASKS: json.dumps([{"data": task} for task in tasks], indent=1) + "\n",
        LABELLING_CONFIG: template_text("label-studio.xml", names=(*target.classes, *others)),
    }
    contents = {name: text.encode("utf-8", "backslashreplace") for name, text in texts.items()}
    contents[LABELS] = csv_lines([LABEL_COLUMNS, *((task["path"], "", task["part"]) for task in tasks)])
    for name, content in contents.items():
        with atomic(folder / name) as file:
            file.write(content)


def template_text(template: str, **values: Any) -> str:
    """The text of a template of this package."""
    return templates("measure").get_template(template).render(values)
