"""Choose target images to label: a random part to measure with, and an informative part to train on."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from xml.sax.saxutils import quoteattr

import numpy as np
from PIL import Image

from cdtrans.config import RunFolder
from cdtrans.errors import CdtransError, counted
from cdtrans.inputs.images import UnreadableImage, decode
from cdtrans.measure.answers import QUESTIONS, Question, read_answers, read_parts, write_questions
from cdtrans.measure.intervals import strata, strata_for
from cdtrans.measure.labels import COLUMNS, NO_CLASS, UNSURE, Answers, read_rows, require_clear
from cdtrans.measure.matching import find
from cdtrans.measure.page import render
from cdtrans.measure.target import FinishedTarget, read_target
from cdtrans.record.files import atomic, csv_line
from cdtrans.record.run_folder import require_output
from cdtrans.reporting.pictures import jpeg
from cdtrans.runtime.screen import Screen
from cdtrans.schema import Help, Range, checked

PAGE, LABELS, TASKS, LABELLING_CONFIG = "ask.html", "labels.csv", "label-studio.json", "label-studio.xml"
# Thirty labels of fifty give an interval about 20 points wide; it narrows only with the square root, while the images
# that the model is least sure of teach it most.
RANDOM_SHARE = 0.6
CANDIDATES = 10  # the informative part is chosen among so many times as many of the least certain images
TIE = 1e-9  # smaller than any difference between two shares; breaks ties at random
SIDE = 480  # pixels of the longer side of an image on the page


@dataclass(frozen=True)
class Asked:
    """The images to label, in the order of the page, and where the files are."""

    folder: Path
    questions: tuple[Question, ...]

    def count(self, part: str) -> int:
        return sum(question.part == part for question in self.questions)

    def summary(self) -> dict[str, Any]:
        """The promised keys of `ask --json`."""
        return {
            "page": str(self.folder / PAGE),
            "labels": str(self.folder / LABELS),
            "images": len(self.questions),
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
    screen = screen or Screen(quiet=True)
    if budget < 1:
        raise CdtransError(f"The budget must be at least one image, not {budget}.")
    target = read_target(Path(run))
    require_clear(target.classes)
    folder = Path(out) if out else target.run / Path(QUESTIONS).parent
    for name in (PAGE, LABELS, TASKS, LABELLING_CONFIG):
        require_output(folder / name, "questions", "--out")
    answers = read_answers(target)
    if not force:
        refuse_to_lose(folder / LABELS, target, answers)
    chosen = choose(target, answers, budget, seed)
    pictures = read_pictures(target, [q.image for q in chosen if q.image not in answers], screen)
    questions = [q for q in chosen if q.image in pictures]
    if not questions:
        raise CdtransError(f"All {len(target)} images of the target have been answered; there is nothing to ask.")
    write_files(folder, target, questions, pictures)
    parts = read_parts(target) | {q.image: q.part for q in chosen if q.image in pictures or q.image in answers}
    write_questions(target, parts, seed=seed, budget=budget)
    return Asked(folder, tuple(questions))


def refuse_to_lose(file: Path, target: FinishedTarget, answers: Answers) -> None:
    """An error if the file holds labels that the run has neither read with `answer` nor been trained with."""
    if not file.exists():
        return
    unread = strange = 0
    for row in filter(lambda row: row.label, read_rows(file)):
        index, trained_as = find(row, file, target)
        if index is not None:
            unread += index not in answers or answers[index].label != row.label
        else:
            strange += row.label != trained_as
    advice = "give another --out, or use --force to replace them"
    if unread:
        advice = f"read them with 'cdtrans answer {target.run} {file}', or use --force to replace them"
    if unread and strange:
        are = counted(strange, "is of an image", "are of images")
        advice += f" ({are} that 'answer' cannot use: copy the file to keep them)"
    if unread + strange:
        raise CdtransError(f"'{file}' holds {counted(unread + strange, 'label')} that would be lost: {advice}.")


def choose(target: FinishedTarget, answers: Answers, budget: int, seed: int) -> list[Question]:
    """At most `budget` new images in random order, so that stopping half-way leaves a random half labelled. Images
    that have a label and are now drawn for the random part come in addition: they need not be labelled again."""
    rng = np.random.default_rng(seed)
    left = len(target) - len(answers)
    if budget >= left:
        new = [Question(i, "random") for i in range(len(target)) if i not in answers or answers[i].part != "random"]
    else:
        measured = np.array([i for i, a in answers.items() if a.part == "random"], dtype=np.int64)
        wanted = max(1, round(RANDOM_SHARE * budget))
        drawn = draw_random(target.confidence, wanted, measured, rng).tolist()
        closed = {*answers, *drawn}
        informative = draw_informative(target, budget - wanted, closed)
        new = [*(Question(i, "random") for i in drawn), *(Question(i, "informative") for i in informative)]
    return [new[i] for i in rng.permutation(len(new))]


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


def draw_informative(target: FinishedTarget, count: int, closed: set[int]) -> list[int]:
    """The images that the model is least sure of, spread over its predicted classes and over the features. The next
    image is of the class with the fewest so far, and as far as possible from the chosen ones."""
    features = target.features / np.maximum(np.linalg.norm(target.features, axis=1, keepdims=True), 1e-12)
    rows = [row for row, index in enumerate(target.sampled.tolist()) if index not in closed]
    rows.sort(key=lambda row: target.confidence[target.sampled[row]])
    rows = rows[: CANDIDATES * count]
    distance = np.ones(len(target.sampled))  # to the nearest chosen image
    chosen: list[int] = []
    of_class: Counter[int] = Counter()
    for _ in range(min(count, len(rows))):
        best = min(rows, key=lambda row: (of_class[target.predicted[target.sampled[row]]], -distance[row]))
        rows.remove(best)
        chosen.append(int(target.sampled[best]))
        of_class[target.predicted[target.sampled[best]]] += 1
        distance = np.minimum(distance, 1 - features @ features[best])
    return chosen


def read_pictures(target: FinishedTarget, indices: list[int], screen: Screen) -> dict[int, str]:
    """The images as data URLs, at their own proportions. Files that cannot be read any more are left out."""
    pictures, missing = {}, []
    with screen.track("images", len(indices)) as task:
        for index in indices:
            try:
                image = decode(target.root / target.paths[index])
            except UnreadableImage as error:
                missing.append((target.paths[index], str(error)))
            else:
                image.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
                pictures[index] = jpeg(image)
            task.advance(1)
    if missing:
        path, cause = missing[0]
        where = f"in '{target.root}' (the first: {path!r}, {cause})"
        problem = f"{len(missing)} of {len(indices)} chosen images cannot be read {where}"
        if not pictures:
            raise CdtransError(
                f"{problem}; put the target back, or run this in the folder where 'cdtrans adapt' was run."
            )
        screen.warn(f"{problem}; they are skipped.")
    return pictures


def write_files(folder: Path, target: FinishedTarget, questions: list[Question], pictures: dict[int, str]) -> None:
    """The files for labelling. They do not hold predictions, and the page does not show the parts: both would bias."""
    rows = [{"path": target.paths[q.image], "digest": target.digests[q.image], "part": q.part} for q in questions]
    tasks = [{"data": row | {"image": pictures[q.image]}} for row, q in zip(rows, questions, strict=True)]
    lines = [COLUMNS, *((target.paths[q.image], "", q.part) for q in questions)]
    page = render(target, [task["data"] for task in tasks])
    contents = {
        PAGE: page.encode("utf-8", "backslashreplace"),
        TASKS: (json.dumps(tasks, indent=1) + "\n").encode(),
        LABELLING_CONFIG: labelling_config(target.classes).encode("utf-8", "backslashreplace"),
        LABELS: b"".join(map(csv_line, lines)),
    }
    for name, content in contents.items():
        with atomic(folder / name) as file:
            file.write(content)


def labelling_config(classes: tuple[str, ...]) -> str:
    """Label Studio's labelling interface for the tasks."""
    choices = "\n".join(f"    <Choice value={quoteattr(name)}/>" for name in (*classes, UNSURE, NO_CLASS))
    return (
        '<View>\n  <Image name="image" value="$image"/>\n'
        f'  <Choices name="label" toName="image" choice="single">\n{choices}\n  </Choices>\n</View>\n'
    )
