"""Findings of linear classifiers on features with known labels."""

import numpy as np
import pytest

from cdtrans.trust.preflight import Finding
from cdtrans.trust.probes import Sample, class_rows, domain_distance, probe, target_start
from support import says

CLASSES = ("ant", "bee", "cow", "dog")
EACH = 40


def seen(name: str, kinds: list[int], *, seed: int, shift: float = 0.0, spread: float = 1.0) -> Sample:
    """Each kind is a cloud around a point of its own; a domain is shifted as a whole."""
    centres = 4 * np.random.default_rng(99).normal(size=(8, 24))
    drawn = np.random.default_rng(seed).normal(size=(len(kinds), 24))
    return Sample(centres[kinds] + spread * drawn + shift, [f"{name}-{n}" for n in range(len(kinds))])


def run(labels: list[int] | np.ndarray, target: list[int], **target_kind) -> dict[str, Finding]:
    source = seen("s", np.repeat(range(4), EACH).tolist(), seed=0)
    found = probe(source, np.array(labels), CLASSES, seen("t", target, seed=1, **target_kind), seed=0, leading=24)
    return {f.subject: f for f in found}


TRUE = np.repeat(range(4), EACH)
SAME = TRUE[::2].tolist()


def test_a_clean_task_has_nothing_to_warn_of() -> None:
    found = run(TRUE, SAME, shift=1.0)
    assert {f.state for f in found.values()} == {"ok"}, found
    assert found["separability"].details["accuracy"] == 1
    assert found["mislabelled images"].details["images"] == []
    assert found["classes that occur"].details == {"absent": [], "scattered": []}


def test_shuffled_labels_are_a_stop_and_noisy_features_a_warning() -> None:
    many = np.repeat(range(4), 200)
    source, wrong = seen("s", many.tolist(), seed=0), np.random.default_rng(0).permutation(many)
    (shuffled, *_) = probe(source, wrong, CLASSES, seen("t", SAME, seed=1), seed=0, leading=24)
    assert shuffled.state == "stop"
    assert says(shuffled.advice, "labels", "images")
    noisy = seen("s", TRUE.tolist(), seed=0, spread=16)
    (separability, *_) = probe(noisy, TRUE, CLASSES, seen("t", SAME, seed=1), seed=0, leading=24)
    assert separability.state == "warning"
    few = np.arange(0, len(TRUE), 8)
    small = Sample(noisy.features[few], [noisy.paths[n] for n in few])
    (separability, *_) = probe(small, np.tile([0, 1, 2, 3], 5), CLASSES, seen("t", SAME, seed=1), seed=0, leading=24)
    assert separability.state == "warning"  # chance may do that


def test_wrong_labels_are_listed_the_surest_first() -> None:
    labels = TRUE.copy()
    labels[[3, 70]] = [2, 0]
    finding = run(labels, SAME)["mislabelled images"]
    assert finding.state == "warning"
    listed = finding.details["images"]
    assert {i["path"]: (i["label"], i["looks_like"]) for i in listed} == {"s-3": ("cow", "ant"), "s-70": ("ant", "bee")}
    assert [i["probability"] for i in listed] == sorted((i["probability"] for i in listed), reverse=True)
    assert listed[0]["path"] in finding.statement
    assert "cdtrans check --json" in finding.advice


def test_the_distance_of_the_domains() -> None:
    far, near = (run(TRUE, SAME, shift=shift)["domain distance"] for shift in (3.0, 0.0))
    assert far.details["accuracy"] > 0.95
    assert far.details["a_distance"] == pytest.approx(4 * far.details["accuracy"] - 2)
    assert not far.advice
    assert near.details["accuracy"] < 0.6
    assert "look alike" in near.advice
    assert domain_distance(0.4).details["a_distance"] == 0


def test_classes_that_the_target_lacks_are_named() -> None:
    """Images taken for a class that is not there are scattered among their neighbours; those of a class that is are
    not, however the shares shift."""
    eight = [f"kind {k}" for k in range(8)]
    source = np.repeat(range(8), EACH)
    x = seen("s", source.tolist(), seed=0, spread=3)

    def rows(target: list[int]) -> list[Finding]:
        y = seen("t", target, seed=1, spread=3)
        return class_rows(target_start(x.features, source, y.features, 24), np.unique(source), eight)

    classes, unseen = rows([0, 1, 2] * 60)
    assert classes.state == "warning"
    assert classes.details["absent"] == eight[3:]
    assert says(classes.statement, "5 of 8", *eight[3:])
    assert says(classes.advice, "cdtrans ask SOURCE TARGET", "--target-classes")
    assert (unseen.state, unseen.subject) == ("ok", "images of no class")
    assert "cdtrans ask SOURCE TARGET" in unseen.advice
    shares_shift, _ = rows(source.tolist() + [0, 1] * 200)
    assert (shares_shift.state, shares_shift.details["absent"]) == ("ok", [])


def test_a_class_of_one_image_and_a_class_without() -> None:
    """As a sample of a large source may have them."""
    labels = np.array([0] * 30 + [1] + [3] * 30)
    found = probe(
        seen("s", labels.tolist(), seed=0), labels, CLASSES, seen("t", [0, 3] * 20, seed=1), seed=0, leading=24
    )
    by_subject = {f.subject: f for f in found}
    assert "cow" not in by_subject["classes that occur"].statement
    assert by_subject["separability"].details["accuracy"] == 60 / 61


def test_the_same_features_have_the_same_findings() -> None:
    """Even if so noisy that the parts held out decide what is found."""
    noisy, target = seen("s", TRUE.tolist(), seed=0, spread=8), seen("t", SAME, seed=1, spread=8)
    first, again, otherwise = (probe(noisy, TRUE, CLASSES, target, seed, 24) for seed in (0, 0, 1))
    assert first == again
    assert first != otherwise
