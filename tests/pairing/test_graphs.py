"""Labels from a probe and neighbour graphs: pieces against plain computations, and the whole on a made-up gap."""

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cdtrans.network.encoding import Encoded
from cdtrans.pairing import graphs
from cdtrans.pairing.graphs import Graph, Statistics, balanced, fit_probe, label_target, most_certain, relabel_target
from cdtrans.pairing.neighbours import unit_rows
from cdtrans.pairing.pairs import Domains, Proposals, TargetLabels


def across_a_gap(
    *, classes: int = 4, source: int = 30, target: int = 30, gap: float = 3.0, dim: int = 16, seed: int = 0
) -> tuple[Domains, Tensor]:
    """Gaussian classes; the target is moved and stretched. Its labels come back beside it."""
    generator = torch.Generator().manual_seed(seed)
    means = 2.0 * torch.randn(classes, dim, generator=generator)

    def domain(count: int) -> tuple[Tensor, Tensor]:
        labels = torch.arange(classes).repeat_interleave(count)
        return means[labels] + torch.randn(len(labels), dim, generator=generator), labels

    (x, y), (z, answers) = domain(source), domain(target)
    z = z * torch.linspace(0.5, 2.0, dim) + gap * torch.randn(dim, generator=generator)
    logits = torch.zeros(len(x), classes), torch.zeros(len(z), classes)
    return Domains(Encoded(x, logits[0]), y, Encoded(z, logits[1])), answers


class TestGraph:
    def test_neighbours_are_those_of_the_dense_matrix_in_any_tile(self, monkeypatch: pytest.MonkeyPatch) -> None:
        x = unit_rows(torch.randn(50, 5, generator=torch.Generator().manual_seed(1)))
        similarity = (x @ x.T).fill_diagonal_(-2)
        value, index = similarity.topk(graphs.GRAPH_NEIGHBOURS, dim=1)
        for tile in (3, 7, 1000):
            monkeypatch.setattr(graphs, "TILE", tile)
            found = Graph.search(x, x, itself=0)
            assert found.neighbours.tolist() == index.tolist()
            torch.testing.assert_close(found.weight, (graphs.HEAT * value).softmax(dim=1))

    def test_an_image_is_not_its_own_neighbour_on_the_joint_graph(self) -> None:
        source, target = (unit_rows(torch.randn(n, 3)) for n in (5, 6))
        found = Graph.search(target, torch.cat([source, target]), itself=5)
        assert all(5 + i not in row for i, row in enumerate(found.neighbours.tolist()))

    def test_spreading_is_the_iteration_with_a_dense_matrix(self) -> None:
        generator = torch.Generator().manual_seed(2)
        x, known = torch.randn(20, 4, generator=generator), F.one_hot(torch.arange(8) % 3, 3).float()
        q = torch.rand(12, 3, generator=generator).softmax(dim=1)
        found = Graph.search(unit_rows(x[8:]), unit_rows(x), itself=8)
        dense = torch.zeros(12, 20).scatter(1, found.neighbours, found.weight)
        p = q
        for _ in range(graphs.STEPS):
            p = 0.9 * dense @ torch.cat([known, p]) + 0.1 * q
        torch.testing.assert_close(found.spread(q, 0.9, None, known), p)

    def test_one_image_alone_keeps_what_it_has(self) -> None:
        q = torch.tensor([[0.3, 0.7]])
        assert Graph.search(torch.ones(1, 2), torch.ones(1, 2), itself=0).spread(q, 0.8, None).tolist() == q.tolist()

    def test_steady_is_the_share_of_neighbours_with_the_same_label(self) -> None:
        graph = Graph(torch.tensor([[1, 2], [0, 2], [0, 1]]), torch.full((3, 2), 0.5))
        assert float(graph.steady(torch.tensor([7, 7, 3]))) == pytest.approx(2 / 6)
        assert float(graph.steady(torch.tensor([7, 7, 7]))) == 1
        alone = Graph(torch.zeros((1, 0), dtype=torch.long), torch.zeros((1, 0)))
        assert float(alone.steady(torch.tensor([3]))) == 1


class TestProbe:
    def test_it_is_ridge_regression_up_to_a_scale(self) -> None:
        generator = torch.Generator().manual_seed(3)
        x, y = torch.randn(40, 6, generator=generator), F.one_hot(torch.arange(40) % 3, 3).float()
        probe = fit_probe(x, y, 0.1)
        one = torch.cat([x, torch.ones(40, 1)], dim=1).double()
        expected = torch.linalg.solve(one.T @ one / 40 + 0.1 * 6**0.5 * torch.eye(7), one.T @ y.double() / 40)
        found = torch.cat([probe.weight, probe.bias[None]]).double()
        scale = float(found.norm() / expected.norm())
        torch.testing.assert_close(found, scale * expected, atol=1e-4, rtol=1e-4)
        assert 1 <= scale <= 10**2.5 * 1.001

    def test_its_scale_is_the_one_of_the_least_cross_entropy(self) -> None:
        x, y = torch.randn(60, 6, generator=torch.Generator().manual_seed(4)), torch.arange(60) % 3
        x[range(60), y] += 2
        probe = fit_probe(x, F.one_hot(y, 3).float(), 0.01)

        def loss(factor: float) -> float:
            scores = factor * (x @ probe.weight + probe.bias)
            return float(F.cross_entropy(scores, y, label_smoothing=graphs.SMOOTHING))

        assert loss(1.0) < min(loss(0.7), loss(1.4))


class TestShares:
    def test_they_reach_the_pulled_ones_and_rows_stay_probabilities(self) -> None:
        p = torch.rand(400, 4, generator=torch.Generator().manual_seed(5)) ** 3 * torch.tensor([8.0, 2, 1, 1])
        p = p / p.sum(dim=1, keepdim=True)
        other = (p.argmax(dim=1) + 1) % 4  # every label differs from the source's opinion: pulled by one half
        even = balanced(p, other)
        expected = p.mean(dim=0) ** 0.5
        torch.testing.assert_close(even.mean(dim=0), expected / expected.sum(), atol=2e-3, rtol=0)
        torch.testing.assert_close(even.sum(dim=1), torch.ones(400))

    def test_they_stay_where_the_source_agrees_and_where_images_are_few(self) -> None:
        p = torch.tensor([[0.9, 0.1]] * 90 + [[0.1, 0.9]] * 10)
        torch.testing.assert_close(balanced(p, p.argmax(dim=1)), p, atol=1e-5, rtol=0)
        few, many = balanced(p[::25], 1 - p[::25].argmax(dim=1)), balanced(p, 1 - p.argmax(dim=1))
        assert float((few - p[::25]).abs().max()) < float((many - p).abs().max())


def test_the_most_certain_images_are_taken_class_by_class() -> None:
    p = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4], [0.45, 0.55]])
    assert most_certain(p, 0.5).tolist() == [0, 1, 4]
    assert most_certain(p, 1.0).tolist() == [0, 1, 2, 3, 4]


def test_statistics_of_a_handful_are_drawn_to_the_sources() -> None:
    source, few = Statistics.of(torch.randn(1000, 3)), torch.full((2, 3), 5.0)
    alone, with_prior = Statistics.of(few), Statistics.of(few, prior=source)
    assert alone.variance.tolist() == [0, 0, 0]
    assert (with_prior.variance > 0.5).all()
    assert ((with_prior.mean - source.mean) < (alone.mean - source.mean)).all()


class TestWhole:
    def test_it_repairs_a_gap_that_a_probe_on_raw_features_does_not(self) -> None:
        domains, answers = across_a_gap()
        raw = fit_probe(domains.source.features, F.one_hot(domains.source_labels, 4).float(), graphs.LOOSE)
        before = float((raw.probabilities(domains.target.features).argmax(dim=1) == answers).float().mean())
        found = label_target(domains, classes=4, leading=8)
        after = float((found.probabilities.argmax(dim=1) == answers).float().mean())
        assert after > 0.95
        assert before < 0.85

    def test_labels_do_not_depend_on_the_order_of_the_target(self) -> None:
        domains, _ = across_a_gap(classes=3, target=20)
        order = torch.randperm(60, generator=torch.Generator().manual_seed(6))
        moved = Domains(domains.source, domains.source_labels, Encoded(*(x[order] for x in domains.target)))
        a, b = (label_target(d, classes=3, leading=16).probabilities for d in (domains, moved))
        torch.testing.assert_close(b, a[order], atol=1e-4, rtol=1e-3)

    @pytest.mark.parametrize(
        ("classes", "source", "target"), [(2, 5, 5), (3, 1, 4), (100, 2, 1), (4, 30, 1), (31, 5, 20)]
    )
    def test_odd_sizes_give_probabilities(self, classes: int, source: int, target: int) -> None:
        domains, _ = across_a_gap(classes=classes, source=source, target=target)
        found = label_target(domains, classes=classes, leading=16).probabilities
        assert found.isfinite().all()
        torch.testing.assert_close(found.sum(dim=1), torch.ones(classes * target))

    @pytest.mark.parametrize("images", [1, 2, 10])
    def test_a_handful_of_target_images_is_labelled_like_the_source(self, images: int) -> None:
        """With a small gap: from ten images nobody can learn a wide one."""
        domains, answers = across_a_gap(classes=3, source=20, gap=0.1)
        some = torch.linspace(0, len(answers) - 1, images).long()
        few = Domains(domains.source, domains.source_labels, Encoded(*(x[some] for x in domains.target)))
        found = label_target(few, classes=3, leading=16).probabilities.argmax(dim=1)
        assert float((found == answers[some]).float().mean()) >= 0.8

    def test_given_labels_stay_and_teach_their_neighbours(self) -> None:
        """Two classes have each other's names in the source, so only the given labels can tell."""
        domains, answers = across_a_gap(classes=3, gap=0.1)
        swapped = torch.tensor([1, 0, 2])[answers]
        some = torch.tensor([0, 9, 30, 39, 60, 69])
        given = TargetLabels(some, swapped[some])
        with_labels = dataclasses.replace(domains, given=given)
        without = label_target(domains, classes=3, leading=16).probabilities.argmax(dim=1)
        assert float((without == swapped).float().mean()) < 0.4
        first = label_target(with_labels, classes=3, leading=16).probabilities
        assert first[some].tolist() == F.one_hot(given.labels, 3).tolist()
        more = dataclasses.replace(domains, given=TargetLabels(torch.arange(0, 90, 3), swapped[::3]))
        learnt = label_target(more, classes=3, leading=16).probabilities.argmax(dim=1)
        assert float((learnt == swapped).float().mean()) > 0.65, "the source says 0.33"
        again = relabel_target(with_labels, without, leading=16)
        assert again[some].tolist() == F.one_hot(given.labels, 3).tolist()

    def test_equal_images_and_a_constant_feature_are_no_error(self) -> None:
        x, y = torch.ones(12, 4), torch.arange(12) % 2
        domains = Domains(Encoded(x, torch.zeros(12, 2)), y, Encoded(x[:5], torch.zeros(5, 2)))
        assert label_target(domains, classes=2, leading=4).probabilities.isfinite().all()

    def test_new_labels_follow_the_network_where_features_agree_with_it(self) -> None:
        domains, answers = across_a_gap(gap=0.5)
        wrong = answers.clone()
        wrong[::10] = (wrong[::10] + 1) % 4
        domains = Domains(
            domains.source, domains.source_labels, domains.target._replace(logits=3.0 * F.one_hot(wrong, 4))
        )
        found = relabel_target(domains, wrong, leading=16).argmax(dim=1)
        assert float((found == answers).float().mean()) > 0.97, "one in ten was wrong, and its neighbours corrected it"


def test_pairs_within_a_class_are_the_most_similar_ones() -> None:
    domains, answers = across_a_gap(classes=3, source=6, target=5)
    pairs = Proposals.within_class(domains, answers)
    assert pairs.target.tolist() == list(range(15))
    assert pairs.source_labels.tolist() == answers.tolist()
    similarity = unit_rows(domains.target.features) @ unit_rows(domains.source.features).T
    similarity[answers[:, None] != domains.source_labels[None]] = -2
    assert pairs.source.tolist() == similarity.argmax(dim=1).tolist()


def test_thousands_of_classes_are_spread_in_parts_to_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    graph = Graph(torch.randint(0, 40, (30, 7)), torch.rand(30, 7))
    q, known = torch.rand(30, 150), torch.rand(10, 150)
    given = TargetLabels(torch.tensor([3, 8]), torch.tensor([149, 0]))
    parts = graph.spread(q, 0.9, given, known)
    monkeypatch.setattr("cdtrans.pairing.graphs.CACHED_CLASSES", 150)
    assert torch.equal(parts, graph.spread(q, 0.9, given, known))


def test_the_scale_of_thousands_of_classes_is_fitted_on_fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """26 cross-entropies of all rows and classes were most of the time of a run."""
    rows: list[int] = []
    real = torch.nn.functional.cross_entropy
    monkeypatch.setattr("cdtrans.pairing.graphs.F.cross_entropy", lambda x, y: (rows.append(x.numel()), real(x, y))[1])
    fit_probe(torch.randn(3000, 8), torch.eye(3000), 0.03)
    assert max(rows) <= 7_000_000
