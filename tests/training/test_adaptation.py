from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cdtrans.config import Config, make_config
from cdtrans.data.batches import Images
from cdtrans.errors import CdtransError, Hopeless
from cdtrans.model.cross_attention import Branches
from cdtrans.model.encoding import Encoded, Encoder
from cdtrans.model.head import Output
from cdtrans.pairing.pairs import Search, require_pairs, search_pairs
from cdtrans.runtime.screen import Screen
from cdtrans.storage.run import Run
from cdtrans.training import adaptation
from cdtrans.training.adaptation import Adaptation, adapt_to_target, find_pairs
from cdtrans.trust.watch import Watch
from tiny_task import log_lines

CPU = torch.device("cpu")
SOURCES, TARGETS = 12, 9


def settings(**values: Any) -> Config:
    base = {"device": "cpu", "precision": "fp32", "batch_size": 4, "epochs": 5, "guard": False, "select": "last"}
    return make_config(base | {"rebuild_every": 2, "lr": 0.01, "warmup_epochs": 1} | values)


def numbered(count: int, first: int) -> Images:
    """Image n is first + n all over, so that a crop still tells which image it is of."""
    values = np.arange(first, first + count, dtype=np.uint8)
    pixels = np.broadcast_to(values[:, None, None, None], (count, 6, 6, 3)).copy()
    return Images(pixels, np.arange(count), crop=4, mean=(0.0,) * 3, std=(1.0,) * 3, device=CPU)


class Probe(nn.Module):
    """In place of the model: remembers which pairs it was trained on. Both domains look alike to it, class by class:
    the class of image n is n modulo 3, and its scores say so."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.pairs: list[tuple[int, int]] = []

    def encode(self, images: Tensor) -> Output:
        number = (images.mean(dim=(1, 2, 3)) * 255).round().long() % 100
        feature = nn.functional.one_hot(number % 3, 3) + 0.01 * number[:, None]
        return Output(feature, self.scale * 5 * nn.functional.one_hot(number % 3, 3))

    def forward(self, source: Tensor, target: Tensor) -> Branches:
        assert self.training
        numbers = [(x.mean(dim=(1, 2, 3)) * 255).round().long().tolist() for x in (source, target)]
        self.pairs += list(zip(*numbers, strict=True))
        return Branches(self.encode(source), self.encode(target), self.encode(source))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run.open(tmp_path / "run", settings(), {})
    yield run
    run.close()


def adapt(run: Run, **values: Any) -> tuple[Probe, Adaptation]:
    probe = Probe()
    labels = torch.arange(SOURCES) % 3
    source, target = numbered(SOURCES, 0), numbered(TARGETS, 100)
    config, screen = settings(**values), Screen(quiet=True)
    return probe, adapt_to_target(run, probe, source, labels, target, None, config, screen)  # type: ignore[arg-type]


def some_pairs(count: int) -> Search:
    """As if a search had found these. The labels differ, so that it shows which side is trained on which."""
    n = torch.arange(count)
    sources, targets = torch.arange(SOURCES) % 3, (torch.arange(TARGETS) + 1) % 3
    return Search(n % SOURCES, n % TARGETS, n >= 0, sources, targets, targets, sources)


@pytest.mark.parametrize(("every", "epochs"), [(1, [1, 2, 3, 4, 5]), (2, [1, 3, 5]), (3, [1, 4]), (10, [1])])
def test_pairs_are_searched_anew_every_few_epochs_and_written_down(run: Run, every: int, epochs: list[int]) -> None:
    adapt(run, rebuild_every=every)
    lines = [line for line in log_lines(run.folder) if line["event"] == "pairs"]
    assert [(line["round"], line["epoch"]) for line in lines] == list(enumerate(epochs, 1))
    files = sorted(p.name for p in (run.folder / "pairs").iterdir())
    assert files == [f"round-0{n}.npz" for n in range(1, len(epochs) + 1)]
    with np.load(run.folder / "pairs" / "round-01.npz") as arrays:
        assert set(arrays.files) == {"source", "target", "source_labels", "target_labels", "kept"}
        assert (len(arrays["source"]), arrays["kept"].sum()) == (lines[0]["proposed"], lines[0]["kept"])
        assert (arrays["kept"] == (arrays["source_labels"] == arrays["target_labels"])).all()


def test_it_trains_on_the_pairs_that_were_found_and_on_no_others(run: Run) -> None:
    probe, _ = adapt(run, epochs=1)
    with np.load(run.folder / "pairs" / "round-01.npz") as arrays:
        kept = arrays["kept"]
        found = list(zip(arrays["source"][kept].tolist(), (arrays["target"][kept] + 100).tolist(), strict=True))
    trained = probe.pairs
    assert len(trained) == len(found) // 4 * 4
    assert not set(trained) - set(found)
    # in another order than found, and none more often than it was found
    assert trained != found[: len(trained)]
    assert all(trained.count(pair) <= found.count(pair) for pair in set(trained))


def test_each_side_of_a_pair_is_trained_on_its_own_label(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[int, int]] = []
    losses = adaptation.adaptation_losses

    def recorded(out: Branches, y_s: Tensor, y_t: Tensor, *how: Any) -> tuple[Tensor, ...]:
        given.extend(zip(y_s.tolist(), y_t.tolist(), strict=True))
        return losses(out, y_s, y_t, *how)

    monkeypatch.setattr(adaptation, "adaptation_losses", recorded)
    monkeypatch.setattr(adaptation, "find_pairs", lambda *_: some_pairs(9))
    probe, _ = adapt(run, epochs=1, batch_size=3)
    assert [(s % 3, (s + 1) % 3) for s, _ in probe.pairs] == given
    assert sorted(probe.pairs) == [(n, 100 + n) for n in range(9)]


@pytest.mark.parametrize(
    ("count", "batch", "sizes"),
    [
        (10, 4, 2),  # the last two are left out of this epoch, as the authors do
        (8, 4, 2),
        (3, 64, 1),  # fewer pairs than a batch: a smaller batch
        (2, 64, 1),
    ],
)
def test_batches_are_whole_and_fewer_pairs_than_a_batch_make_a_smaller_one(
    run: Run, monkeypatch: pytest.MonkeyPatch, count: int, batch: int, sizes: int
) -> None:
    monkeypatch.setattr(adaptation, "find_pairs", lambda *_: some_pairs(count))
    probe, _ = adapt(run, epochs=1, batch_size=batch)
    assert len(probe.pairs) == sizes * min(batch, count)


def test_every_domain_is_encoded_once_for_what_it_is_needed_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target before the first and after every epoch, the source when pairs are searched and at the end."""
    encoded: list[str] = []
    encode = Encoder.__call__

    def counted(self: Encoder, images: Images, name: str) -> Encoded:
        encoded.append("source" if len(images) == SOURCES else "target")
        assert encoded[-1] == name
        return encode(self, images, name)

    monkeypatch.setattr(Encoder, "__call__", counted)
    adapt(run, epochs=4, rebuild_every=2)
    assert encoded == ["target", "source", "target", "target", "source", "target", "target", "source"]


def test_the_predictions_of_every_epoch_are_left_for_an_answer_key(run: Run) -> None:
    _, adapted = adapt(run, epochs=2)
    files = sorted((run.folder / "predictions").iterdir())
    assert [file.name for file in files] == [f"epoch-00{n}.npz" for n in (0, 1, 2)]
    with np.load(files[-1]) as arrays:
        assert adapted.after is not None
        assert arrays["predicted"].tolist() == adapted.after.predicted.tolist() == [n % 3 for n in range(TARGETS)]
        assert arrays["confidence"].shape == (TARGETS,)


def test_the_log_holds_the_three_losses_and_the_pairs_of_every_epoch(run: Run) -> None:
    adapt(run, epochs=2)
    lines = [line for line in log_lines(run.folder) if line["event"] == "epoch"]
    assert [(line["stage"], line["epoch"]) for line in lines] == [("adaptation", 1), ("adaptation", 2)]
    assert all(line[f"loss_{name}"] > 0 for line in lines for name in ("source", "target", "distillation"))
    assert all(line["pairs"] >= 4 for line in lines)


@pytest.mark.parametrize("left", [0, 1])
def test_no_pair_left_says_how_many_were_rejected_by_what_and_what_to_try(run: Run, left: int) -> None:
    """Each class is where the other is thought to be, so that no pair, or one, agrees."""
    features = torch.eye(4)[:2].repeat(3, 1)
    source = Encoded(features, features)
    target = Encoded(features, 10 * features)
    labels = torch.tensor([1, 0, 1, 0, 1, 0])
    if left:
        labels[5] = 1  # the last source image is of the class that its nearest target is thought to be
    config = settings(mutual_pairs="once")
    found = find_pairs(run, 1, source, labels, target, config, Screen(quiet=True))
    with pytest.raises(CdtransError) as caught:
        require_pairs(found.pairs(), 1)
    said = str(caught.value)
    assert f"Only {left} of " in said
    assert " pairs were left in epoch 1" in said
    assert all(word in said for word in ("rejected", "nearest centre", "--source-epochs", "--no-center-aware"))
    assert log_lines(run.folder)[0]["kept"] == left


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {"center_aware": True, "mutual": "twice", "pairing": "two_way", "target_class": "center"}),
        (
            {"center_aware": False, "mutual_pairs": "once", "pairing": "one_way_source", "target_class": "pair"},
            {"center_aware": False, "mutual": "once", "pairing": "one_way_source", "target_class": "pair"},
        ),
    ],
)
def test_the_settings_reach_the_search_for_pairs(
    run: Run, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], expected: dict[str, Any]
) -> None:
    asked: list[dict[str, Any]] = []

    def recorded(*tensors: Tensor, **options: Any) -> Search:
        asked.append(options)
        return search_pairs(*tensors, **options)

    monkeypatch.setattr(adaptation, "search_pairs", recorded)
    adapt(run, epochs=1, **values)
    assert asked == [expected] * 2, "before the epoch, and to see what became of it"


@pytest.mark.parametrize("guard", [True, False])
def test_training_that_breaks_off_late_leaves_the_best_epoch_so_far(
    run: Run, monkeypatch: pytest.MonkeyPatch, guard: bool
) -> None:
    look = Watch.epoch

    def breaks_off(self: Watch, epoch: int, target: Encoded) -> None:
        if epoch == 3:
            raise Hopeless("The loss is not finite in the adaptation stage, epoch 3, step 1; no state was saved.")
        look(self, epoch, target)

    monkeypatch.setattr(Watch, "epoch", breaks_off)
    _, adapted = adapt(run, guard=guard)
    assert (adapted.chosen_epoch, adapted.last) == (2, {})
    assert adapted.after is not None
    assert adapted.measures[0].name == "training broke off"


def test_training_that_breaks_off_at_once_is_an_error_without_the_guard(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks_off(*anything: Any) -> None:
        raise Hopeless("no pairs")

    monkeypatch.setattr(adaptation, "require_pairs", breaks_off)
    with pytest.raises(Hopeless):
        adapt(run, guard=False)
    _, adapted = adapt(run, guard=True)
    assert (adapted.after, adapted.chosen_epoch) == (None, 0)
    assert [measure.name for measure in adapted.measures] == ["training broke off"]
