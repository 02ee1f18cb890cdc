"""Every file of a run folder, once: its name, the type that it holds, and what to do if it is damaged.

`RunWriter` writes them and `RunRecord` reads them; no other module names them."""

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from cdtrans.config import Resolved
from cdtrans.record.outcome import Answers, Measured, Outcome, Questions, StoredLabel

VERSION = 1  # version of this layout and of the saved state; data.json records it

AGAIN = "run the 'cdtrans adapt' command again with another --out"
RESTORE = f"restore it, or {AGAIN}"
REMOVE = "remove it and run the 'cdtrans adapt' command again"
MOVE = "move it away and run the command again"


@dataclass(frozen=True)
class DomainRecord:
    """One domain of a run."""

    images: int  # without those held out
    scanned: str  # digest of names, sizes and labels on disk, before any image was read
    fingerprint: str  # the same of the images that could be read
    pixels: str  # digest of all pixels
    held_out: int = 0
    classes: dict[str, int] = field(default_factory=dict)  # source images of each class, without those held out


@dataclass(frozen=True)
class DataRecord:
    """The data of a run. A resumed run must find the same."""

    source: DomainRecord
    target: DomainRecord
    answers: str | None = None  # digest of the answers of --answers
    method: str | None = None  # digest of the method's own file
    layout: int = VERSION


@dataclass(frozen=True)
class Environment:
    """The versions and the device of a run."""

    python: str
    system: str
    device: str  # such as 'cuda: NVIDIA H200'
    threads: int
    packages: dict[str, str]


@dataclass(frozen=True)
class ImageTable:
    """The images behind the indices of all other files, by domain: 'source', 'holdout', 'target'."""

    paths: dict[str, tuple[str, ...]]
    digests: dict[str, tuple[str, ...]]  # digests of the pixels


@dataclass(frozen=True)
class SavedEvidence:
    """The evidence of fixed features, see `trust.support.Evidence`."""

    nearest: np.ndarray  # [n, k]
    source_labels: np.ndarray  # [Ns]
    learnable: np.ndarray  # []
    reference: np.ndarray  # [n]
    agreement: np.ndarray  # []
    steady: np.ndarray  # []
    occurs: np.ndarray  # [K] bool
    noticed: np.ndarray  # [] bool
    no_class: np.ndarray  # [Nt]
    candidates: np.ndarray  # [K, c]
    doubt: np.ndarray  # [K]
    strange: np.ndarray  # []
    pretrained: np.ndarray  # [] bool


@dataclass(frozen=True)
class Logits:
    """Logits of the target before the temperature, [Nt, K]."""

    source: np.ndarray  # by the source-only model
    adapted: np.ndarray | None = None  # None without an adapted model


@dataclass(frozen=True)
class Views:
    """How the source-only and the adapted model see the images. Without an adapted model both are the same."""

    before_source: np.ndarray  # [S, D] features of some source images, by the source-only model
    before_target: np.ndarray  # [T, D]
    after_source: np.ndarray  # [S, D] by the adapted model
    after_target: np.ndarray  # [T, D]
    sampled_source: np.ndarray  # [S] the images with features
    sampled_target: np.ndarray  # [T]
    source_labels: np.ndarray  # [Ns]
    source_predicted: np.ndarray  # [Ns] by the source-only model, as are the next two
    source_confidence: np.ndarray  # [Ns]
    source_own: np.ndarray  # [Ns] probability of the image's own label
    target_before: np.ndarray  # [Nt] predicted classes
    target_after: np.ndarray  # [Nt]
    confidence_before: np.ndarray  # [Nt] calibrated
    confidence_after: np.ndarray  # [Nt]
    no_class: np.ndarray  # [Nt] the higher, the less a target image is like any class
    doubt: np.ndarray  # [K] the higher, the less clear it is whether a class occurs
    candidates: np.ndarray  # [K, c] target images that are most likely of each class
    changed: np.ndarray  # [Nt] total variation between both models' probabilities


@dataclass(frozen=True)
class EpochPredictions:
    """The target after one epoch."""

    predicted: np.ndarray  # [Nt]
    confidence: np.ndarray  # [Nt] without temperature


@dataclass(frozen=True)
class PairsRecord:
    """One search for pairs: every proposal."""

    source: np.ndarray  # [P] indices of images; -1 without source images
    target: np.ndarray  # [P]
    source_labels: np.ndarray  # [P]
    target_labels: np.ndarray  # [P] pseudo-labels
    kept: np.ndarray  # [P] bool


Line = dict[str, Any]  # a line of a .jsonl file
Content = TypeVar("Content")


@dataclass(frozen=True)
class File(Generic[Content]):
    """A file of a run folder. The ending of its name decides the format."""

    name: str
    holds: type[Content]
    advice: str = RESTORE  # advice if the file is damaged

    def numbered(self, number: int) -> "File[Content]":
        """One of a series."""
        return File(self.name.format(number), self.holds, self.advice)


# Written when a run begins
CONFIG = File("config.yaml", Resolved, AGAIN)
DATA = File("data.json", DataRecord, AGAIN)
ENVIRONMENT = File("environment.json", Environment)
IMAGES = File("images.csv", ImageTable)
GIVEN = File("given-answers.csv", StoredLabel)  # those of --answers that the run has used
EVIDENCE = File("evidence.npz", SavedEvidence, AGAIN)
# While it trains
LOG = File("log.jsonl", Line)  # events; without timestamps, so that equal runs have equal logs
TIMINGS = File("timings.jsonl", Line)  # how long every stage took, and when it ended
STATE = File("state/state.pt", dict, AGAIN)  # to resume from; a finished run has none
FROZEN_FEATURES = File("state/features.pt", dict, AGAIN)  # features of a backbone that stage 1 does not train
ROUND = File("pairs/round-{:02}.npz", PairsRecord)
PREDICTED = File("predictions/epoch-{:03}.npz", EpochPredictions)  # epoch 0: the source-only model
# When it ends; result.json is the last, except for the report
LOGITS = File("logits.npz", Logits)
VIEWS = File("views.npz", Views)
PREDICTIONS = File("predictions.csv", bytes)  # the target, by the chosen model
RESULT = File("result.json", Outcome, REMOVE)
REPORT = File("report.html", bytes)
# By later commands
MEASURED = File("evaluation.json", Measured, MOVE)  # `eval` with most images of the run's own target
QUESTIONS = File("ask/questions.json", Questions, MOVE)
ANSWERS = File("answers.json", Answers, MOVE)
ONNX = "model.onnx"  # where `export` writes if it is not told otherwise

# Folders of models; each holds these two files
SOURCE, ADAPTED, LAST = MODELS = ("source", "adapted", "last")
CARD, WEIGHTS = "model.json", "model.safetensors"

LOCK_FILE = ".lock"
TENSORBOARD, WANDB = "tensorboard", "wandb"  # folders
MLFLOW = File("mlflow-run.txt", bytes)  # MLflow's name of the run
FIRST = (LOCK_FILE, f".{CONFIG.name}.draft")  # left by a run that was killed right at the start

RUN_FILES = tuple(value for value in list(globals().values()) if isinstance(value, File))
# What no verb may write to at a user's wish
RESERVED = {LOCK_FILE, *MODELS, TENSORBOARD, WANDB, *(file.name.partition("/")[0] for file in RUN_FILES)} - {"ask"}
