"""The plane that both domains are laid out on."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from cdtrans.reporting.embedding import SAMPLE, embedding, marks, mirrored_like, on_planes, spread
from cdtrans.reporting.record import read_record
from cdtrans.reporting.sections import Missing

CPU = torch.device("cpu")


def test_groups_stay_groups_whatever_their_length() -> None:
    rng = np.random.default_rng(0)
    directions = rng.normal(size=(3, 64))
    group = np.arange(60) % 3
    x = directions[group] * rng.uniform(0.1, 9, (60, 1)) + 0.01 * rng.normal(size=(60, 64))
    (points,) = on_planes(x[None].astype(np.float16), CPU)
    assert points.shape == (60, 2)
    centers = np.stack([points[group == k].mean(0) for k in range(3)])
    nearest = np.linalg.norm(points[:, None] - centers, axis=2).argmin(1)
    assert np.array_equal(nearest, group)


def test_equal_features_have_equal_planes() -> None:
    x = np.random.default_rng(1).normal(size=(1, 12, 8))
    assert np.array_equal(on_planes(x, CPU), on_planes(x, CPU))


@pytest.mark.parametrize("mirror", [[1, 1], [-1, 1], [1, -1], [-1, -1]])
def test_the_second_plane_is_turned_to_be_like_the_first(mirror: list[int]) -> None:
    first = np.random.default_rng(0).normal(size=(20, 2))
    assert np.allclose(mirrored_like(3 * first * mirror, first), 3 * first)


def test_a_large_sample_is_thinned_evenly() -> None:
    rows = spread(1000)
    assert len(rows) == SAMPLE
    assert rows[0] == 0
    assert rows[-1] == 999
    assert np.diff(rows).max() <= 3
    assert spread(7).tolist() == list(range(7))


def test_before_and_after(full: Path) -> None:
    record = read_record(full)
    shown = embedding(record)
    assert [p.name for p in shown.planes] == ["Before, source-only", f"After, epoch {record.result['chosen_epoch']}"]
    assert (shown.sources, shown.targets) == (24, 21)
    before, after = shown.planes
    assert [(len(p.rings), len(p.dots)) for p in shown.planes] == [(24, 21)] * 2
    assert before.dots != after.dots
    labels, *predicted = record.view_arrays("source_labels", "target_before", "target_after")
    assert len(set(labels.tolist())) > 1
    for plane, classes in zip(shown.planes, predicted, strict=True):
        assert [m.colour for m in plane.rings] == labels.tolist(), "the source has its labels"
        assert [m.colour for m in plane.dots] == classes.tolist(), "the target what was predicted"


def test_the_second_plane_is_turned(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = read_record(full)
    first = on_planes(np.random.default_rng(0).normal(size=(1, 45, 8)), CPU)[0]
    monkeypatch.setattr("cdtrans.reporting.embedding.on_planes", lambda *_: np.stack([first, -first]))
    before, after = embedding(record).planes
    assert [m[:2] for m in before.rings + before.dots] == [m[:2] for m in after.rings + after.dots]


def test_marks_fill_the_square_at_one_scale() -> None:
    points = np.array([[0.0, 0.0], [10.0, 5.0], [10.0, 0.0]])
    drawn = marks(points, np.array([3, 23, 0]))
    assert [(float(m.x), float(m.y)) for m in drawn] == [(8, 266), (352, 94), (352, 266)], "up is up"
    assert [m.colour for m in drawn] == [3, 3, 0], "colours repeat"
    assert marks(np.zeros((2, 2)), np.zeros(2, int))[0][:2] == ("180.0", "180.0")


@pytest.mark.parametrize(("judged", "names"), [(0, []), (3, ["After, epoch 3 (not used)"])])
def test_a_run_that_went_back_shows_what_was_refused_if_there_is_any(run: Path, judged: int, names: list[str]) -> None:
    result = json.loads((run / "result.json").read_text())
    back = {"chosen_model": "source", "chosen_epoch": 0, "judged_epoch": judged}
    (run / "result.json").write_text(json.dumps(result | back))
    assert [p.name for p in embedding(read_record(run)).planes] == ["Before, source-only", *names]


def test_without_features_or_with_hardly_any(run: Path) -> None:
    with np.load(run / "views.npz") as arrays:
        few = {name: arrays[name][:4] for name in arrays.files}
    np.savez(run / "views.npz", **few)
    assert "too few" in embedding(read_record(run)).why
    (run / "views.npz").unlink()
    assert isinstance(embedding(read_record(run)), Missing)
