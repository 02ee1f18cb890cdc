"""The classes that occur and the images that belong to none, on made-up features whose classes are known."""

import pytest
import torch
from torch import Tensor

from cdtrans.network.encoding import Encoded
from cdtrans.pairing import occurring
from cdtrans.pairing.graphs import Start, label_from, label_target
from cdtrans.pairing.occurring import (
    absent_classes,
    candidates,
    class_steadiness,
    evenness,
    first_of_each,
    no_class_score,
    rare,
)
from cdtrans.pairing.pairs import Domains

CLASSES, EVEN = 10, [40] * 10
THIN = [round(60 * 10 ** (-k / 9)) for k in range(CLASSES)]  # 60 to 6 images
PARTIAL = [100] * 3 + [0] * 7


def gaussian_classes(counts: list[int], *, strangers: int = 0, seed: int = 0) -> tuple[Domains, Tensor]:
    """So many target images of each class, moved and stretched, and one cluster of strangers, labelled K."""
    generator, dim = torch.Generator().manual_seed(seed), 16
    means = 1.5 * torch.randn(CLASSES + 1, dim, generator=generator)
    means[CLASSES] *= 2
    y = torch.arange(CLASSES).repeat_interleave(30)
    truth = torch.arange(CLASSES + 1).repeat_interleave(torch.tensor([*counts, strangers]))
    x = means[y] + torch.randn(len(y), dim, generator=generator)
    z = (means[truth] + torch.randn(len(truth), dim, generator=generator)) * torch.linspace(0.5, 2, dim)
    z = z + torch.randn(dim, generator=generator)
    return Domains(Encoded(x, x.new_zeros(len(x), CLASSES)), y, Encoded(z, z.new_zeros(len(z), CLASSES))), truth


def start_of(domains: Domains) -> Start:
    return Start.of(domains, classes=CLASSES, leading=8)


def accuracy(labels: Tensor, truth: Tensor) -> float:
    return float((labels == truth).double().mean())


class TestAbsentClasses:
    @pytest.mark.parametrize("seed", [0, 1])
    @pytest.mark.parametrize("counts", [EVEN, THIN], ids=["closed", "thin"])
    def test_nothing_is_noticed_where_every_class_occurs(self, counts: list[int], seed: int) -> None:
        assert absent_classes(start_of(gaussian_classes(counts, seed=seed)[0])) is None

    @pytest.mark.parametrize("seed", [0, 1])
    def test_most_classes_that_do_not_occur_are_noticed_and_labels_gain(self, seed: int) -> None:
        domains, truth = gaussian_classes(PARTIAL, seed=seed)
        start = start_of(domains)
        absent = absent_classes(start)
        assert absent is not None
        assert absent.tolist() == [False] * 3 + [True] * 7
        today = label_from(start, None).probabilities.argmax(dim=1)
        kept = (~absent).nonzero().squeeze(1)
        noticed = kept[label_from(start.only(~absent), None).probabilities.argmax(dim=1)]
        assert accuracy(noticed, truth) > accuracy(today, truth) + 0.05

    def test_even_shares_need_more_images_and_more_unsteady_classes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        start = start_of(gaussian_classes(PARTIAL, seed=1)[0])
        monkeypatch.setattr(occurring, "UNEVEN", 0.0)  # the shares are never uneven enough
        found = absent_classes(start)
        assert found is not None
        assert not found[:3].any()
        monkeypatch.setattr(occurring, "ENOUGH_IMAGES", 31)  # there are 30 per class
        assert absent_classes(start) is None
        monkeypatch.setattr(occurring, "ENOUGH_IMAGES", 30)
        monkeypatch.setattr(occurring, "MOST", (int(found.sum()) + 1) / CLASSES)
        assert absent_classes(start) is None

    def test_told_classes_alone_get_labels(self) -> None:
        domains, truth = gaussian_classes(PARTIAL)
        start, occurs = start_of(domains), torch.arange(CLASSES) < 3
        found = label_from(start.only(occurs), None).probabilities
        assert found.shape == (300, 3)
        assert accuracy(found.argmax(dim=1), truth) > 0.95

    def test_what_occurs_everywhere_is_todays_labels_to_the_bit(self) -> None:
        domains, _ = gaussian_classes(EVEN)
        a = label_from(start_of(domains), None).probabilities
        assert a.equal(label_target(domains, classes=CLASSES, leading=8).probabilities)


def test_steadiness_is_high_for_classes_that_keep_together_and_none_for_scattered_ones() -> None:
    domains, truth = gaussian_classes(EVEN)
    start = start_of(domains)
    assert (class_steadiness(start, truth, CLASSES) > 0.5).all()
    scattered = torch.randint(CLASSES, (len(truth),), generator=torch.Generator().manual_seed(0))
    assert (class_steadiness(start, scattered, CLASSES).abs() < 0.1).all()
    alone = torch.zeros_like(truth).index_fill(0, torch.tensor([5]), 1)
    assert class_steadiness(start, alone, CLASSES)[1:].tolist() == [0] * (CLASSES - 1), "one image or none"


def test_rare_classes_are_found_among_those_that_are_left() -> None:
    labels = torch.tensor([0] * 60 + [1] * 40 + [3] * 50)
    p = torch.full((150, 4), 0.1).scatter(1, labels[:, None], 0.7)  # three certain classes, and a doubt in each image
    gone = torch.tensor([False, False, False, True])
    assert rare(p, torch.full((4,), 0.25), gone).tolist() == [False, False, True, False], "gone is not found again"


def test_evenness_is_one_for_equal_shares_and_one_part_for_a_single_class() -> None:
    assert evenness(torch.arange(40) % 4, 4) == pytest.approx(1)
    assert evenness(torch.zeros(40, dtype=torch.long), 4) == pytest.approx(1 / 4)


class TestCandidates:
    def test_nine_different_images_of_each_class(self) -> None:
        shown, doubt = candidates(start_of(gaussian_classes(EVEN)[0]))
        assert shown.shape == (CLASSES, 9)
        assert doubt.shape == (CLASSES,)
        assert all(len(set(row)) == 9 for row in shown.tolist())

    def test_they_show_whether_a_class_occurs_and_absent_ones_are_in_doubt(self) -> None:
        domains, truth = gaussian_classes(PARTIAL)
        shown, doubt = candidates(start_of(domains))
        seen = (truth[shown] == torch.arange(CLASSES)[:, None]).sum(dim=1)
        assert (seen[:3] == 9).all()
        assert (seen[3:] == 0).all()
        assert doubt[:3].max() < doubt[3:].min()

    def test_the_best_image_by_the_graphs_comes_first_and_then_the_probes(self) -> None:
        start = start_of(gaussian_classes(EVEN)[0])
        shown, _ = candidates(start)
        graph, probe = start.graph.argmax(dim=0), start.probe.topk(2, dim=0).indices
        assert shown[:, 0].equal(graph)
        second = torch.where(probe[0] == graph, shown[:, 1], probe[0])  # the graphs' next, if both agree
        assert shown[:, 1].equal(second)

    def test_a_target_of_fewer_images_is_shown_whole(self) -> None:
        shown, _ = candidates(start_of(gaussian_classes([2, 2, *[0] * 8])[0]))
        assert [sorted(row) for row in shown.tolist()] == [[0, 1, 2, 3]] * CLASSES

    def test_first_of_each_marks_repeated_values_by_column(self) -> None:
        rows = torch.tensor([[5, 1], [5, 2], [3, 1], [5, 2]])
        assert first_of_each(rows).tolist() == [[True, True], [False, True], [True, False], [False, False]]


class TestNoClassScore:
    def test_a_cluster_of_strangers_ranks_highest(self) -> None:
        domains, truth = gaussian_classes(EVEN, strangers=40)
        score = no_class_score(start_of(domains))
        stranger = truth == CLASSES
        assert float(stranger[score.argsort(descending=True)[:40]].double().mean()) > 0.95

    def test_it_is_standardised_and_finite_for_any_number_of_images(self) -> None:
        for counts in (EVEN, [1, *[0] * 9], [1, 1, *[0] * 8]):
            score = no_class_score(start_of(gaussian_classes(counts)[0]))
            assert score.isfinite().all()
            assert float(score.mean()) == pytest.approx(0, abs=1e-4)
            if len(score) > 2:
                assert float(score.std(correction=0)) == pytest.approx(1, abs=1e-3)

    def test_source_images_of_absent_classes_are_no_neighbours(self) -> None:
        """Images of a class that is said to be absent are strangers, however near its source images are."""
        domains, truth = gaussian_classes(EVEN)
        start, occurs = start_of(domains), torch.arange(CLASSES) > 0
        before, after = no_class_score(start), no_class_score(start.only(occurs))
        first = truth == 0
        assert float(after[first].mean()) > float(before[first].mean()) + 1
        assert float(after[first].mean()) > float(after[~first].mean()) + 1
