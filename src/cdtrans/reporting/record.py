"""A run folder read for the report. A part that is missing, as in older runs, or cannot be read is None here, and its
section of the page says so. On damaged files libraries raise almost anything, so any error means that."""

import csv
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cdtrans.config import read_yaml
from cdtrans.errors import CdtransError
from cdtrans.record.run_folder import ANSWERS, CARD, CONFIG, EVALUATION, TIMINGS, read_result

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Round:
    """One search for pairs. The arrays hold all proposed pairs, or only the kept ones in an older run."""

    number: int
    source: np.ndarray  # [P] indices of images
    target: np.ndarray  # [P]
    source_labels: np.ndarray  # [P]
    target_labels: np.ndarray  # [P] pseudo labels
    kept: np.ndarray  # [P] bool
    complete: bool  # whether rejected pairs are included
    facts: dict[str, Any]  # the round's line in the log


@dataclass(frozen=True)
class Record:
    """The contents of a run folder."""

    run: Path
    result: dict[str, Any]
    config: dict[str, Any]
    environment: dict[str, Any] | None
    data: dict[str, Any] | None
    classes: tuple[str, ...]
    source: tuple[str, ...]  # the paths of images.csv by index; empty without it
    target: tuple[str, ...]
    log: list[dict[str, Any]]
    timings: list[dict[str, Any]]
    rounds: list[Round]
    views: Arrays | None
    evaluation: dict[str, Any] | None
    answers: dict[str, Any] | None  # of `cdtrans answer`

    def events(self, name: str) -> list[dict[str, Any]]:
        return [line for line in self.log if line.get("event") == name]

    @property
    def trained_with_labels(self) -> bool:
        """Whether this is a run of an ablation whose pairs were made with target labels."""
        return bool(self.result.get("trained_with_key"))

    @property
    def target_labels(self) -> int:
        """How many target images the user's --target-labels trained."""
        return int(self.result.get("target_labels", 0))

    @property
    def used_source(self) -> bool:
        """Whether the run selected the source-only model."""
        return bool(self.result["chosen_model"] == "source")

    @property
    def shown_epoch(self) -> int:
        """The epoch of adaptation that the page compares with the source-only model: the chosen one, even if the guard
        then refused it. Runs of the first version did not record it; for them it is the last epoch."""
        if "judged_epoch" in self.result:
            return int(self.result["judged_epoch"])
        chosen = int(self.result["chosen_epoch"])
        if chosen > 0 and not self.used_source:
            return chosen
        epochs = [int(e["epoch"]) for e in self.events("scores") + self.events("epoch") if e.get("stage") != "source"]
        return max([chosen, *epochs])

    @property
    def adapted(self) -> bool:
        """Whether there is an adapted model to compare with the source-only one; the guard may have refused it."""
        return self.shown_epoch > 0

    @property
    def held_out(self) -> int:
        """How many source images were held out."""
        return int(((self.data or {}).get("source") or {}).get("held_out", 0))

    def view_arrays(self, *names: str) -> list[np.ndarray] | None:
        """These arrays of views.npz, or None if one of them is missing."""
        views = self.views or {}
        return [views[name] for name in names] if views.keys() >= set(names) else None

    def predicted(self, epoch: int) -> np.ndarray | None:
        """[Nt] the predicted class of every target image after an epoch; 0 is the source-only model."""
        arrays = read_arrays(self.run / "predictions" / f"epoch-{epoch:03}.npz", ("predicted",))
        return None if arrays is None else arrays["predicted"]

    def root(self, domain: str) -> Path:
        """The folder that the paths of a domain are relative to."""
        where, root = (str(self.config.get(name) or "") for name in (domain, "root"))
        if os.path.isfile(where):  # a list
            return Path(root) if root else Path(where).parent
        return Path(where)


def read_record(run: Path) -> Record:
    """Read a finished run; an unfinished one is an error."""
    result = read_result(run)
    try:
        config = read_yaml(run / CONFIG)
    except CdtransError:
        config = {}
    log = read_lines(run / "log.jsonl")
    facts = {line.get("round"): line for line in log if line.get("event") == "pairs"}
    images = read_images(run / "images.csv")
    return Record(
        run=run,
        result=result,
        config=config,
        environment=read_json(run / "environment.json"),
        data=read_json(run / "data.json"),
        classes=read_classes(run),
        source=images.get("source", ()),
        target=images.get("target", ()),
        log=log,
        timings=read_lines(run / TIMINGS),
        rounds=read_rounds(run / "pairs", facts),
        views=read_arrays(run / "views.npz"),
        evaluation=read_json(run / EVALUATION),
        answers=read_json(run / ANSWERS),
    )


def read_json(file: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except Exception:  # see above
        return None
    return value if isinstance(value, dict) else None


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The lines of a .jsonl file; incomplete ones are skipped."""
    try:
        text = file.read_text(encoding="utf-8")
    except Exception:  # see above
        return []
    lines = []
    for line in text.splitlines():
        try:
            lines.append(json.loads(line))
        except Exception:  # see above
            continue
    return [line for line in lines if isinstance(line, dict)]


def read_arrays(file: Path, names: Sequence[str] = ()) -> Arrays | None:
    """The named arrays of a .npz file, or all of them."""
    try:
        with np.load(file) as arrays:
            return {name: arrays[name] for name in names or arrays.files}
    except Exception:  # see above
        return None


def read_classes(run: Path) -> tuple[str, ...]:
    """The classes in the model's order; a run stopped before adaptation has only the source model."""
    for model in ("adapted", "source"):
        card = read_json(run / model / CARD)
        if card is not None and "classes" in card:
            return tuple(card["classes"])
    return ()


def read_images(file: Path) -> dict[str, tuple[str, ...]]:
    """Domain -> the paths of its images by index."""
    paths: dict[str, list[str]] = {}
    try:
        with open(file, encoding="utf-8", errors="surrogateescape", newline="") as lines:
            for row in csv.DictReader(lines):
                paths.setdefault(row["domain"], []).append(row["path"])
    except Exception:  # see above
        return {}
    return {domain: tuple(listed) for domain, listed in paths.items()}


def read_rounds(folder: Path, facts: dict[Any, dict[str, Any]]) -> list[Round]:
    rounds = []
    for file in sorted(folder.glob("round-*.npz")):
        arrays = read_arrays(file)
        if arrays is not None and {"source", "target", "source_labels", "target_labels"} <= arrays.keys():
            number = int(file.stem.removeprefix("round-"))
            complete = "kept" in arrays
            kept = arrays.pop("kept") if complete else np.ones(len(arrays["source"]), dtype=bool)
            sides = {name: arrays[name] for name in ("source", "target", "source_labels", "target_labels")}
            rounds.append(Round(number=number, kept=kept, complete=complete, facts=facts.get(number, {}), **sides))
    return rounds
