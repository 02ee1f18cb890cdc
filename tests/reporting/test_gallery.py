"""Which pictures are shown, and what is said of them."""

import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from cdtrans.network.weights import load_model
from cdtrans.reporting import gallery
from cdtrans.reporting.attention import cross_attention
from cdtrans.reporting.gallery import sample_pairs, turn
from cdtrans.reporting.pictures import Pictures, heated, jpeg
from cdtrans.reporting.record import Record, Round, read_record
from cdtrans.reporting.sections import Missing
from support import says


class Counted:
    def __init__(self) -> None:
        self.done = 0

    def advance(self, done: int, note: str = "") -> None:
        self.done += done


def pictures(record: Record) -> tuple[Pictures, Pictures]:
    sizes = {"resize": record.config["resize"], "crop": record.config["crop"]}
    return tuple(Pictures(record.root(d), getattr(record, d), **sizes) for d in ("source", "target"))


def shown(run: Path) -> gallery.Gallery:
    record = read_record(run)
    return gallery.gallery(record, *pictures(record), Counted())


def random_round(number: int, count: int, rejected: float, seed: int = 0) -> Round:
    rng = np.random.default_rng([seed, number])
    labels, other = rng.integers(0, 10, (2, count), dtype=np.int32)
    kept = rng.random(count) >= rejected
    index = rng.integers(0, 50_000, (2, count), dtype=np.int32)
    return Round(number, index[0], index[1], labels, np.where(kept, labels, other), kept, True, {})


class TestSample:
    def test_rounds_and_states_have_equal_parts_and_classes_come_in_turn(self) -> None:
        chosen = sample_pairs([random_round(n, 3000, 0.02) for n in range(1, 17)])
        assert len(chosen) == gallery.PAIRS
        cells = Counter((r.number, bool(r.kept[i])) for r, i in chosen)
        assert cells == {(n, kept): 9 for n in (1, 6, 11, 16) for kept in (True, False)}
        for number, kept in cells:
            classes = [r.source_labels[i] for r, i in chosen if (r.number, r.kept[i]) == (number, kept)]
            assert len(set(classes)) >= 8  # of 10; chance alone would give 6

    def test_the_last_round_comes_first_then_by_class_kept_before_rejected(self) -> None:
        chosen = sample_pairs([random_round(n, 3000, 0.5) for n in (1, 2)])
        keys = [(-r.number, r.source_labels[i], not r.kept[i]) for r, i in chosen]
        assert keys == sorted(keys)

    def test_without_rejected_pairs_kept_ones_fill_the_page(self) -> None:
        chosen = sample_pairs([random_round(1, 500, 0.0)])
        assert len(chosen) == gallery.PAIRS
        assert len(sample_pairs([random_round(1, 5, 0.5)])) == 5

    def test_a_pair_found_from_both_sides_is_shown_once(self) -> None:
        twice = np.array([4, 4, 7], dtype=np.int32)
        r = Round(1, twice, twice, twice % 3, twice % 3, np.ones(3, dtype=bool), True, {})
        assert len(sample_pairs([r])) == 2

    def test_equal_runs_show_equal_pairs(self) -> None:
        rounds = [random_round(1, 3000, 0.3)]
        assert [i for _, i in sample_pairs(rounds)] == [i for _, i in sample_pairs(rounds)]

    def test_turn(self) -> None:
        assert turn(np.array([5, 2, 5, 5, 2, 9])).tolist() == [0, 0, 1, 2, 1, 0]


class TestPairs:
    def test_every_pair_is_what_its_round_says(self, full: Path) -> None:
        record, found = read_record(full), shown(full)
        assert {p.round for p in found.pairs} == {1, 2}
        assert {p.kept for p in found.pairs} == {True, False}
        assert found.of == sum(len(r.kept) for r in record.rounds)
        for p in found.pairs:
            r = record.rounds[p.round - 1]
            s, t = record.source.index(p.source_path), record.target.index(p.target_path)
            (i, *_) = np.flatnonzero((r.source == s) & (r.target == t))
            assert p.kept == r.kept[i] == (p.source_class == p.target_class)
            assert p.source_class == record.classes[r.source_labels[i]] == p.source_path.split("/")[0]
            assert p.target_class == record.classes[r.target_labels[i]]
            assert len({p.source, p.target, p.heat}) == 3
        assert found.class_names == {"blue", "green", "red"}

    def test_the_heat_map_is_the_adapted_model_s(self, full: Path) -> None:
        record, found = read_record(full), shown(full)
        source, target = pictures(record)
        model, card = load_model(full / "adapted")
        for p in found.pairs[:3]:
            t = target[record.target.index(p.target_path)]
            inputs = []
            for pixels in (source[record.source.index(p.source_path)], t):
                scaled = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None] / 255
                mean, std = (torch.tensor(x).view(1, 3, 1, 1) for x in (card.mean, card.std))
                inputs.append((scaled - mean) / std)
            assert p.heat == jpeg(heated(t, cross_attention(model, *inputs)[0].numpy()))

    def test_vanished_files_leave_the_rest(self, full: Path, tmp_path: Path, finished) -> None:
        copy = shutil.copytree(finished.task.target, tmp_path / "target")
        record = read_record(full)
        gone = {p.target_path for p in shown(full).pairs[::2]}
        for path in gone:
            (copy / path).unlink()
        record.config["target"] = str(copy)
        source, target = pictures(record)
        task = Counted()
        found = gallery.gallery(record, source, target, task)
        assert target.missing == len(gone) > 0
        assert source.missing == 0
        for p in found.pairs:
            assert (p.target is None) == (p.heat is None) == (p.target_path in gone)
            assert p.source is not None
        assert task.done == sum(p.heat is not None for p in found.pairs) > 0

    def test_without_an_adapted_model_the_source_only_model_looks(self, run: Path) -> None:
        with_both = shown(run)
        assert (with_both.model, with_both.why) == ("adapted", "")
        (run / "adapted" / "model.safetensors").unlink()
        found = shown(run)
        assert (found.model, found.why) == ("source", "")
        assert all(p.heat for p in found.pairs)
        assert {p.heat for p in found.pairs}.isdisjoint(p.heat for p in with_both.pairs)

    def test_without_any_model_there_are_pairs_and_a_reason(self, run: Path) -> None:
        for model in ("adapted", "source"):
            (run / model / "model.safetensors").unlink()
        found = shown(run)
        assert says(found.why, "no heat maps", "no model")
        assert all(p.source and p.target and p.heat is None for p in found.pairs)

    def test_a_damaged_model_is_the_reason(self, run: Path) -> None:
        (run / "adapted" / "model.safetensors").write_bytes(b"")
        assert "is damaged" in shown(run).why

    @pytest.mark.parametrize("tidied", ["pairs", "images.csv"])
    def test_a_tidied_run(self, run: Path, tidied: str) -> None:
        shutil.rmtree(run / tidied) if (run / tidied).is_dir() else (run / tidied).unlink()
        assert isinstance(shown(run), Missing)

    def test_a_device_that_is_not_here_does_not_matter(self, run: Path) -> None:
        record = read_record(run)
        record.config["device"] = "cuda:7"
        found = gallery.gallery(record, *pictures(record), Counted())
        assert all(p.heat for p in found.pairs)


class TestLooks:
    def test_changed_most_first(self, full: Path) -> None:
        record = read_record(full)
        looks = gallery.changed(record, pictures(record)[1])
        distance = dict(zip(record.target, record.views["changed"], strict=True))
        order = [distance[look.path] for look in looks.images]
        assert order == sorted(order, reverse=True)
        moved = record.views["target_before"] != record.views["target_after"]
        assert looks.of == moved.sum() == len(order) > 1
        i = record.target.index(looks.images[0].path)
        before, after = (record.classes[record.views[f"target_{when}"][i]] for when in ("before", "after"))
        assert looks.images[0].headline == f"{before} → {after}"
        sure = [record.views[f"confidence_{when}"][i] for when in ("before", "after")]
        assert looks.images[0].detail == f"{sure[0]:.0%} → {sure[1]:.0%} sure"

    def test_least_certain_first(self, full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gallery, "LOOKS", 5)
        record = read_record(full)
        looks = gallery.uncertain(record, pictures(record)[1])
        sure = record.views["confidence_after"]
        assert [look.path for look in looks.images] == [record.target[i] for i in np.argsort(sure, kind="stable")[:5]]
        assert looks.of == 21
        assert looks.images[0].detail == f"{sure.min():.0%} sure"

    def test_least_certain_are_those_of_the_model_handed_over(self, run: Path) -> None:
        record = read_record(run)
        record.result["chosen_model"] = "source"
        looks = gallery.uncertain(record, pictures(record)[1])
        sure = record.views["confidence_before"]
        assert looks.images[0].path == record.target[sure.argmin()]
        assert looks.images[0].detail == f"{sure.min():.0%} sure"

    def test_mislabelled_are_those_that_the_model_contradicts(self, run: Path) -> None:
        """One label is wrong on purpose, and one odd image is contradicted less."""
        with np.load(run / "views.npz") as arrays:
            views = {name: arrays[name] for name in arrays.files}
        count = len(views["source_labels"])
        views["source_predicted"] = views["source_labels"].copy()
        views["source_confidence"] = np.full(count, 0.9, np.float16)
        views["source_own"] = views["source_confidence"].copy()
        for i, sure, own in ((3, 0.5, 0.4), (10, 0.95, 0.01)):
            views["source_predicted"][i] = (views["source_labels"][i] + 1) % 3
            views["source_confidence"][i], views["source_own"][i] = sure, own
        np.savez(run / "views.npz", **views)
        record = read_record(run)
        looks = gallery.mislabelled(record, pictures(record)[0])
        assert [look.path for look in looks.images] == [record.source[10], record.source[3]]
        assert looks.images[0].headline == f"labelled {record.source[10].split('/')[0]}"
        assert looks.images[0].detail.endswith("95% sure")
        views["source_predicted"] = views["source_labels"]
        np.savez(run / "views.npz", **views)
        record = read_record(run)
        assert says(gallery.mislabelled(record, pictures(record)[0]).why, "agrees", "every label")

    def test_nothing_changed(self, run: Path) -> None:
        with np.load(run / "views.npz") as arrays:
            views = {name: arrays[name] for name in arrays.files}
        np.savez(run / "views.npz", **views | {"target_after": views["target_before"]})
        record = read_record(run)
        assert says(gallery.changed(record, pictures(record)[1]).why, "predicts the same", "source-only")

    def test_without_views(self, old_run: Path) -> None:
        record = read_record(old_run)
        source, target = pictures(record)
        for made in (
            gallery.changed(record, target),
            gallery.uncertain(record, target),
            gallery.mislabelled(record, source),
        ):
            assert "views.npz" in made.why
