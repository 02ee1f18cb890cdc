"""The choice of images, and their captions."""

import re
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from cdtrans.network.weights import load_model
from cdtrans.record.layout import PairsRecord
from cdtrans.record.outcome import Choice, ClassSet, NoClassCurve
from cdtrans.record.record import RunRecord
from cdtrans.reporting import gallery
from cdtrans.reporting.attention import attention_shares
from cdtrans.reporting.gallery import in_turn, sample_pairs
from cdtrans.reporting.images import heated, jpeg, run_images
from cdtrans.reporting.sections import Missing
from cdtrans.runtime.screen import Screen
from run_folders import change, change_views
from support import says

QUIET = Screen(quiet=True)


def shown(run: Path) -> gallery.Gallery:
    record = RunRecord(run)
    return gallery.gallery(record, *run_images(record), QUIET)


def random_round(number: int, count: int, rejected: float, seed: int = 0) -> PairsRecord:
    rng = np.random.default_rng([seed, number])
    labels, other = rng.integers(0, 10, (2, count), dtype=np.int32)
    kept = rng.random(count) >= rejected
    index = rng.integers(0, 50_000, (2, count), dtype=np.int32)
    return PairsRecord(index[0], index[1], labels, np.where(kept, labels, other), kept)


class TestSample:
    def test_rounds_and_states_have_equal_parts_and_classes_come_in_turn(self) -> None:
        rounds = {n: random_round(n, 3000, 0.02) for n in range(1, 17)}
        chosen = sample_pairs(rounds)
        assert len(chosen) == gallery.SHOWN_PAIRS
        cells = Counter((n, bool(rounds[n].kept[i])) for n, i in chosen)
        assert cells == {(n, kept): 9 for n in (1, 6, 11, 16) for kept in (True, False)}
        for number, kept in cells:
            classes = {rounds[n].source_labels[i] for n, i in chosen if (n, rounds[n].kept[i]) == (number, kept)}
            assert len(classes) >= 8  # out of 10; chance alone would give 6
        assert sample_pairs(rounds) == chosen, "equal runs show equal pairs"

    def test_the_last_round_comes_first_then_by_class_kept_before_rejected(self) -> None:
        rounds = {n: random_round(n, 3000, 0.5) for n in (1, 2)}
        order = [(-n, rounds[n].source_labels[i], not rounds[n].kept[i]) for n, i in sample_pairs(rounds)]
        assert order == sorted(order)

    def test_without_rejected_pairs_kept_ones_fill_the_page(self) -> None:
        assert len(sample_pairs({1: random_round(1, 500, 0.0)})) == gallery.SHOWN_PAIRS
        assert len(sample_pairs({1: random_round(1, 5, 0.5)})) == 5

    def test_a_pair_found_from_both_sides_is_shown_once(self) -> None:
        twice = np.array([4, 4, 7], dtype=np.int32)
        r = PairsRecord(twice, twice, twice % 3, twice % 3, np.ones(3, dtype=bool))
        assert len(sample_pairs({1: r})) == 2

    def test_in_turn(self) -> None:
        assert in_turn([[5, 6, 7], [0, 1], [], [9]]) == [5, 0, 9, 6, 1, 7]


class TestPairs:
    def test_every_pair_is_what_its_round_says(self, full: Path) -> None:
        record, made = RunRecord(full), shown(full)
        paths = record.images.paths
        assert {p.round for p in made.pairs} == {1, 2}
        assert {p.kept for p in made.pairs} == {True, False}
        assert made.of == sum(len(r.kept) for r in record.rounds.values())
        for p in made.pairs:
            r = record.rounds[p.round]
            s, t = paths["source"].index(p.source_path), paths["target"].index(p.target_path)
            (i, *_) = np.flatnonzero((r.source == s) & (r.target == t))
            assert p.kept == r.kept[i] == (p.source_class == p.target_class)
            assert p.source_class == record.classes[r.source_labels[i]] == p.source_path.split("/")[0]
            assert p.target_class == record.classes[r.target_labels[i]]
            assert len({p.source, p.target, p.heat}) == 3
        assert made.class_names == ["blue", "green", "red"]

    def test_the_heat_map_is_the_adapted_model_s(self, full: Path) -> None:
        record, made = RunRecord(full), shown(full)
        source, target = run_images(record)
        model, card = load_model(full / "adapted")
        for p in made.pairs[:3]:
            (s,) = source.fetch([source.paths.index(p.source_path)])
            (t,) = target.fetch([target.paths.index(p.target_path)])
            assert s is not None
            assert t is not None
            inputs = []
            for pixels in (s, t):
                scaled = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None] / 255
                mean, std = (torch.tensor(x).view(1, 3, 1, 1) for x in (card.mean, card.std))
                inputs.append((scaled - mean) / std)
            assert p.heat == jpeg(heated(t, attention_shares(model, *inputs)[0].numpy()))

    def test_vanished_files_leave_the_rest(self, full: Path, tmp_path: Path, finished) -> None:
        copy = shutil.copytree(finished.task.target, tmp_path / "target")
        record = RunRecord(full)
        gone = {p.target_path for p in shown(full).pairs[::2]}
        for path in gone:
            (copy / path).unlink()
        source, target = run_images(record)
        target.root = copy
        made = gallery.gallery(record, source, target, QUIET)
        assert (target.missing, source.missing) == (len(gone), 0)
        for p in made.pairs:
            assert (p.target is None) == (p.heat is None) == (p.target_path in gone)
            assert p.source is not None

    def test_without_an_adapted_model_the_source_only_model_looks(self, run: Path) -> None:
        with_both = shown(run)
        change(run, choice=Choice("source", 0), adapted_epoch=0)
        made = shown(run)
        assert (with_both.model, made.model, made.why) == ("adapted", "source", "")
        assert {p.heat for p in made.pairs}.isdisjoint(p.heat for p in with_both.pairs)

    @pytest.mark.parametrize(("damage", "words"), [("", "is damaged"), (None, "weights")])
    def test_without_a_whole_model_there_are_pairs_and_a_reason(self, run: Path, damage: str, words: str) -> None:
        weights = run / "adapted" / "model.safetensors"
        weights.unlink() if damage is None else weights.write_text(damage)
        made = shown(run)
        assert says(made.why, "no heat maps", words)
        assert all(p.source and p.target and p.heat is None for p in made.pairs)

    def test_without_pairs(self, run: Path) -> None:
        shutil.rmtree(run / "pairs")
        assert isinstance(shown(run), Missing)

    def test_a_device_that_is_not_here_does_not_matter(self, run: Path) -> None:
        (run / "config.yaml").write_text(re.sub("device: cpu", "device: cuda:7", (run / "config.yaml").read_text()))
        assert all(p.heat for p in shown(run).pairs)


class TestLooks:
    def test_changed_most_first(self, full: Path) -> None:
        record = RunRecord(full)
        looks, views, paths = (
            gallery.changed(record, run_images(record)[1]),
            record.views,
            record.images.paths["target"],
        )
        distance = dict(zip(paths, views.changed, strict=True))
        order = [distance[look.path] for look in looks.images]
        assert order == sorted(order, reverse=True)
        assert looks.of == (views.target_before != views.target_after).sum() == len(order) > 1
        i = paths.index(looks.images[0].path)
        before, after = (record.classes[classes[i]] for classes in (views.target_before, views.target_after))
        assert looks.images[0].headline == f"{before} → {after}"
        assert looks.images[0].detail == f"{views.confidence_before[i]:.0%} → {views.confidence_after[i]:.0%} sure"

    @pytest.mark.parametrize("model", ["adapted", "source"])
    def test_least_certain_first_by_the_chosen_model(
        self, run: Path, monkeypatch: pytest.MonkeyPatch, model: str
    ) -> None:
        monkeypatch.setattr(gallery, "LOOKS", 5)
        if model == "source":
            change(run, choice=Choice("source", 0))
        record = RunRecord(run)
        looks, paths = gallery.uncertain(record, run_images(record)[1]), record.images.paths["target"]
        sure = record.views.confidence_before if model == "source" else record.views.confidence_after
        assert [look.path for look in looks.images] == [paths[i] for i in np.argsort(sure, kind="stable")[:5]]
        assert (looks.of, looks.images[0].detail) == (21, f"{sure.min():.0%} sure")

    def test_mislabelled_are_those_that_the_model_contradicts(self, run: Path) -> None:
        """One label is wrong on purpose, and one odd image is contradicted less."""
        labels = RunRecord(run).views.source_labels
        predicted, sure = labels.copy(), np.full(len(labels), 0.9, np.float16)
        own = sure.copy()
        for i, *values in ((3, 0.5, 0.4), (10, 0.95, 0.01)):
            predicted[i] = (labels[i] + 1) % 3
            sure[i], own[i] = values
        change_views(run, source_predicted=predicted, source_confidence=sure, source_own=own)
        record = RunRecord(run)
        looks, paths = gallery.doubtful_labels(record, run_images(record)[0]), record.images.paths["source"]
        assert [look.path for look in looks.images] == [paths[10], paths[3]]
        assert looks.images[0].headline == f"labelled {paths[10].split('/')[0]}"
        assert looks.images[0].detail.endswith("95% sure")
        change_views(run, source_predicted=labels, target_after=record.views.target_before)
        record = RunRecord(run)
        assert says(gallery.doubtful_labels(record, run_images(record)[0]).why, "agrees", "every label")
        assert says(gallery.changed(record, run_images(record)[1]).why, "predicts the same", "source-only")


class TestClassSet:
    """Images that do not belong, and classes that seem absent."""

    @staticmethod
    def strangers(run: Path) -> gallery.Strangers:
        record = RunRecord(run)
        found = gallery.strangers(record, run_images(record)[1])
        assert isinstance(found, gallery.Strangers)
        return found

    def test_the_highest_scores_come_first_and_those_above_the_cut_are_grouped(self, run: Path) -> None:
        record = RunRecord(run)
        paths, count = record.images.paths["target"], len(record.images.paths["target"])
        score = np.linspace(-2, 2, count)[np.random.default_rng(0).permutation(count)]
        two = np.eye(64)[(np.arange(count) % 2)] + 0.01 * np.random.default_rng(0).normal(size=(count, 64))
        change_views(run, no_class=score, before_target=two[record.views.sampled_target])
        found = self.strangers(run)
        assert [look.path for look in found.highest.images] == [paths[i] for i in np.argsort(-score)][: gallery.LOOKS]
        assert sum(len(group.paths) for group in found.groups) == np.count_nonzero(score >= np.quantile(score, 0.9))
        above = {paths[i] for i in np.flatnonzero(score > 0)}
        change(run, class_set=ClassSet(curve=NoClassCurve(0, 1, cut=0.01, share=0.5), total=3))
        groups = self.strangers(run).groups
        assert [{paths.index(path) % 2 for path in group.paths} in ({0}, {1}) for group in groups] == [True, True]
        assert {path for group in groups for path in group.paths} == above
        for group in groups:
            assert group.look.path in group.paths
            assert group.look.headline == f"{len(group.paths)} images"
            assert "nearest class: " in group.look.detail

    def test_one_cloud_is_one_group_and_few_images_are_no_error(self) -> None:
        cloud = np.random.default_rng(0).normal(size=(60, 16))
        cloud /= np.linalg.norm(cloud, axis=1, keepdims=True)
        ((members, middle),) = gallery.similar(cloud)
        assert len(members) == 60
        assert middle == np.linalg.norm(cloud - cloud.mean(axis=0), axis=1).argmin()
        assert [len(gallery.similar(cloud[:n])) for n in (0, 1, 2)] == [0, 1, 1]
        assert len(gallery.similar(np.zeros((9, 4)))) == 1

    def test_who_says_that_there_are_none_sees_none(self, run: Path) -> None:
        change(run, class_set=ClassSet(others=False, total=3))
        record = RunRecord(run)
        assert gallery.strangers(record, run_images(record)[1]) is None

    def test_absent_classes_come_with_their_nearest_images_the_likeliest_mistake_first(self, run: Path) -> None:
        record = RunRecord(run)
        assert gallery.absent(record, run_images(record)[1]) == ()
        change(run, class_set=ClassSet(("blue", "red"), "noticed", total=3))
        change_views(run, doubt=np.array([0.9, 0.1, 0.4]), candidates=np.array([[3, 4], [5, 6], [7, 8]]))
        record = RunRecord(run)
        red, blue = gallery.absent(record, run_images(record)[1])
        paths = record.images.paths["target"]
        assert [(red.name, [look.path for look in red.looks]), (blue.name, [look.path for look in blue.looks])] == [
            ("red", [paths[7], paths[8]]),
            ("blue", [paths[3], paths[4]]),
        ]
        assert red.looks[0].headline == f"taken for {record.classes[record.views.target_after[7]]}"
