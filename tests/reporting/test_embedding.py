"""The plane that both domains are laid out on."""

from pathlib import Path

import numpy as np
import pytest

from cdtrans.record.outcome import Choice
from cdtrans.record.record import RunRecord
from cdtrans.reporting.embedding import embedding, marks, mirrored_like, on_planes
from run_folders import change, change_views
from support import says


def test_groups_stay_groups_whatever_their_length(full: Path) -> None:
    rng = np.random.default_rng(0)
    directions = rng.normal(size=(3, 64))
    group = np.arange(60) % 3
    x = directions[group] * rng.uniform(0.1, 9, (60, 1)) + 0.01 * rng.normal(size=(60, 64))
    (points,) = on_planes(x.astype(np.float16)[None], RunRecord(full))
    assert points.shape == (60, 2)
    centers = np.stack([points[group == k].mean(0) for k in range(3)])
    assert np.array_equal(np.linalg.norm(points[:, None] - centers, axis=2).argmin(1), group)


@pytest.mark.parametrize("mirror", [[1, 1], [-1, 1], [1, -1], [-1, -1]])
def test_the_second_plane_is_turned_to_be_like_the_first(mirror: list[int]) -> None:
    first = np.random.default_rng(0).normal(size=(20, 2))
    assert np.allclose(mirrored_like(3 * first * mirror, first), 3 * first)


def test_before_and_after(full: Path) -> None:
    record = RunRecord(full)
    shown, views = embedding(record), record.views
    assert [p.name for p in shown.planes] == ["Before, source-only", f"After, epoch {record.outcome.adapted_epoch}"]
    assert (shown.sources, shown.targets) == (24, 21)
    before, after = shown.planes
    assert [(len(p.rings), len(p.dots)) for p in shown.planes] == [(24, 21)] * 2
    assert before.dots != after.dots
    assert len(set(views.source_labels.tolist())) > 1
    for plane, classes in zip(shown.planes, (views.target_before, views.target_after), strict=True):
        assert [k for _, _, k in plane.rings] == views.source_labels.tolist(), "the source has its labels"
        assert [k for _, _, k in plane.dots] == classes.tolist(), "the target has its predictions"


def test_marks_fill_the_square_at_one_scale() -> None:
    points = np.array([[0.0, 0.0], [10.0, 5.0], [10.0, 0.0]])
    drawn = marks(points, np.array([3, 23, 0]))
    assert [(float(x), float(y)) for x, y, _ in drawn] == [(8, 266), (352, 94), (352, 266)], "up is up"
    assert [k for _, _, k in drawn] == [3, 3, 0], "colours repeat"
    assert marks(np.zeros((2, 2)), np.zeros(2, int))[0][:2] == ("180.0", "180.0")


@pytest.mark.parametrize(("epoch", "names"), [(0, []), (3, ["After, epoch 3 (not used)"])])
def test_a_run_that_went_back_shows_the_refused_model_if_there_is_one(run: Path, epoch: int, names: list[str]) -> None:
    change(run, choice=Choice("source", 0), adapted_epoch=epoch)
    assert [p.name for p in embedding(RunRecord(run)).planes] == ["Before, source-only", *names]


def test_hardly_any_features(run: Path) -> None:
    views = vars(RunRecord(run).views)
    few = {name: views[name][:4] for name in views if name.startswith(("sampled", "before", "after"))}
    change_views(run, **few)
    assert says(embedding(RunRecord(run)).why, "too few images")
