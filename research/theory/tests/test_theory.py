"""The supplement's simulation: estimators against closed forms, bounds against hand counts, the command end to end."""

import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cdtrans.runtime.screen import Screen
from research.theory import proof_steps, study
from research.theory.__main__ import main
from research.theory.averaging import (
    Averaging,
    NearestMean,
    Setting,
    SoftmaxMean,
    draw,
    draw_noise,
    least_lambda,
    least_neighbours,
    least_setting,
    limit_noise,
    measure,
    place_centres,
)
from research.theory.proof_steps import PAST_ALL_CONDITIONS, least_dimension, lemma_1, lemma_2, limit, shell
from research.theory.study import COLUMNS, SHOWN, TRIALS, cases, nearest_panels, simulate, softmax_panels

DOCS = Path(__file__).parents[3] / "docs"
FILES = ["nearest.svg", "proof-steps.svg", "softmax.svg", "theory.json"]
EVERY = 9  # stride between the points of a trial: every panel keeps some

# Both theorems' conditions, met with room to spare.
NEAREST, NEAREST_MEAN = Setting(200, 2, 256, 0.25), NearestMean(100)
SOFTMAX, SOFTMAX_MEAN = Setting(10**9, 4, 64, 0.25), SoftmaxMean(15.0)


Simulate = Callable[..., dict[str, Any]]


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Simulate:
    """simulated("--out", ...) -> theory.json of `python -m research.theory`, with few points and one trial for each."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(study, "TRIALS", 1)
    monkeypatch.setattr(proof_steps, "SHELL_TRIALS", 20)
    monkeypatch.setattr(study, "nearest_panels", lambda: islice(nearest_panels(), 0, None, EVERY))
    monkeypatch.setattr(study, "softmax_panels", lambda: islice(softmax_panels(), 0, None, EVERY))

    def run(out: Path, *flags: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["research.theory", "--out", str(out), *flags])
        main()
        record: dict[str, Any] = json.loads((out / "theory.json").read_text())
        return record

    return run


class TestInputs:
    @pytest.mark.parametrize(("clusters", "separation"), [(1, 1.0), (2, 2.0), (4, math.sqrt(2)), (5, 0.7), (3, 1.7)])
    def test_centres_are_unit_vectors_at_equal_distances(self, clusters: int, separation: float) -> None:
        centres = place_centres(Setting(8, clusters, 1, 1.0, separation))
        assert np.linalg.norm(centres, axis=1) == pytest.approx(1)
        apart = np.linalg.norm(centres[:, None] - centres, axis=2)
        assert apart[~np.eye(clusters, dtype=bool)] == pytest.approx(separation)

    def test_impossible_settings_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r"5 centres .* dimensions"):
            Setting(4, 5, 1, 1.0)
        with pytest.raises(ValueError, match=r"3 unit vectors .* 1\.8"):
            Setting(8, 3, 1, 1.0, 1.8)

    @pytest.mark.parametrize("dimension", [3, 63, 64, 10**6])
    def test_the_noise_is_gaussian_in_every_dimension(self, dimension: int) -> None:
        """60 inputs, 3 clusters: up to 63 dimensions every coordinate is drawn, from 64 on only the inner products."""
        setting = Setting(dimension, 3, 20, 0.5)
        assert draw_noise(setting, np.random.default_rng(0)).shape == (60, min(dimension, 63))
        noise = [draw_noise(setting, np.random.default_rng(seed)) for seed in range(60)]
        grams = np.array([h @ h.T for h in noise])  # [60, m, m]
        row, column = np.triu_indices(60, 1)
        squares, products = np.diagonal(grams, axis1=1, axis2=2), grams[:, row, column]
        along = np.array([h[:, :3] for h in noise])  # on the axes of the centres
        assert squares.mean() == pytest.approx(0.25, rel=0.03)
        assert dimension * squares.var() / 0.25**2 == pytest.approx(2, rel=0.1)
        assert dimension * (products**2).mean() / 0.25**2 == pytest.approx(1, rel=0.05)
        assert dimension * (along**2).mean() / 0.25 == pytest.approx(1, rel=0.05)
        assert abs(products.mean()) < 0.02 / math.sqrt(dimension)

    def test_each_input_lies_around_its_own_centre(self) -> None:
        setting = Setting(50, 3, 2, 0.01)
        points, centres = draw(setting, np.random.default_rng(0))
        assert centres[:, :3] == pytest.approx(np.repeat(place_centres(setting), 2, axis=0))
        assert np.linalg.norm(points - centres, axis=1) == pytest.approx(0.01, rel=0.5)


class TestNearest:
    def test_the_k_nearest_and_itself_have_equal_weights(self) -> None:
        points = np.random.default_rng(0).normal(size=(40, 5))
        weights = NearestMean(7).weights(points @ points.T)
        for i, point in enumerate(points):
            expected = set(np.argsort(np.linalg.norm(points - point, axis=1))[:7].tolist())
            assert i in expected
            assert set(np.flatnonzero(weights[i]).tolist()) == expected
        assert weights[weights > 0] == pytest.approx(1 / 7)

    def test_averaging_k_independent_noises_divides_the_variance_by_k(self) -> None:
        """With K the size of a far-off cluster there is nothing to choose, and its noises are independent."""
        (row,) = measure(Setting(400, 3, 25, 0.1), [NearestMean(25)], seed=0, trials=40)
        assert row.before == pytest.approx(0.1, rel=0.01)
        assert row.after**2 == pytest.approx(0.1**2 / 25, rel=0.03)
        assert row.own == pytest.approx(1)
        assert row.itself == pytest.approx(1 / 25)

    def test_choosing_the_nearest_leaves_more_noise_than_independence_would(self) -> None:
        few, many = (measure(Setting(20, 2, n, 0.1), [NearestMean(25)], seed=0, trials=10)[0] for n in (30, 300))
        assert many.after > 1.5 * few.after > 1.5 * 0.1 / math.sqrt(25)


class TestSoftmax:
    def test_at_infinite_temperature_it_is_the_mean(self) -> None:
        points = np.random.default_rng(0).normal(size=(30, 4))
        assert SoftmaxMean(0.0).weights(points @ points.T) @ points == pytest.approx(np.tile(points.mean(0), (30, 1)))

    def test_at_temperature_zero_it_is_the_nearest(self) -> None:
        points = np.random.default_rng(0).normal(size=(30, 4))
        points /= np.linalg.norm(points, axis=1, keepdims=True)  # the largest inner product is then the nearest
        gram = points @ points.T
        assert SoftmaxMean(1e9).weights(gram) == pytest.approx(np.eye(30))
        nearest_other = 2 * NearestMean(2).weights(gram) - np.eye(30)
        assert SoftmaxMean(1e9, itself=False).weights(gram) == pytest.approx(nearest_other)

    def test_against_a_sum_one_by_one(self) -> None:
        points = np.random.default_rng(0).normal(size=(6, 3))
        averaged = SoftmaxMean(0.7).weights(points @ points.T) @ points
        for i, x in enumerate(points):
            terms = [math.exp(0.7 * float(y @ x)) for y in points]
            assert averaged[i] == pytest.approx(sum(t * y for t, y in zip(terms, points, strict=True)) / sum(terms))

    @pytest.mark.parametrize("itself", [True, False])
    @pytest.mark.parametrize("lam", [0.5, 4.0, 12.0])
    @pytest.mark.parametrize("separation", [1.2, 1.6])
    def test_the_limit_of_many_dimensions(self, itself: bool, lam: float, separation: float) -> None:
        setting, averaging = Setting(10**13, 3, 12, 0.6, separation), SoftmaxMean(lam, itself)
        (row,) = measure(setting, [averaging], seed=0, trials=2)
        assert row.after == pytest.approx(limit_noise(setting, averaging), rel=1e-4)
        assert row.worst == pytest.approx(row.after, rel=1e-4)

    def test_the_limit_at_temperature_zero_is_the_input_itself(self) -> None:
        assert limit_noise(SOFTMAX, SoftmaxMean(1e6)) == pytest.approx(0.25)


class TestTheorems:
    def test_theorem_1_by_hand(self) -> None:
        """512 inputs, delta 0.05: log(m / delta) = 9.2341."""
        assert least_neighbours(512) == 84  # 9 * 9.2341 = 83.1
        assert NearestMean(84).needed_dimension(Setting(99, 2, 256, 0.25)) == 74  # 8 * 9.2341 = 73.9
        assert NearestMean(84).needed_dimension(Setting(99, 2, 256, 0.6)) == 145  # 0.72 / 0.21421^2 * 9.2341 = 144.9
        assert NearestMean(84).bound(Setting(99, 2, 256, 0.25)) == pytest.approx(0.25 * (0.011905 + 0.331559), rel=1e-4)

    def test_theorem_2_by_hand(self) -> None:
        """256 inputs, sigma 1: log(2m / (delta sigma)) = 9.2341."""
        setting = Setting(10**6, 4, 64, 1.0)
        assert SoftmaxMean(10.0).bound(setting) == pytest.approx(24 * 0.0067379 + 200 * 0.00303877, rel=1e-4)
        assert SoftmaxMean(10.0).needed_dimension(setting) == pytest.approx(640_000 * 9.2341, rel=1e-4)
        assert least_lambda(setting) == pytest.approx(2 * 4.5643, rel=1e-4)  # log 96

    @pytest.mark.parametrize("sigma", [0.1, 0.5, 1.0])
    def test_where_theorem_2_is_only_just_met_its_bound_is_its_claim(self, sigma: float) -> None:
        setting, lam = least_setting(4, 64, sigma)
        assert SoftmaxMean(lam).bound(setting) == pytest.approx(sigma / 2, rel=1e-6)
        assert all(SoftmaxMean(lam).conditions(setting).values())
        assert not SoftmaxMean(lam).conditions(replace(setting, dimension=setting.dimension - 1))["d"]
        assert not SoftmaxMean(lam * 0.999).conditions(setting)["lambda"]

    def test_the_bounds_vanish_in_their_limits(self) -> None:
        assert NearestMean(10**9).bound(NEAREST) < 1e-4
        assert SoftmaxMean(100.0).bound(replace(SOFTMAX, dimension=10**20)) < 1e-4

    @pytest.mark.parametrize(
        ("setting", "averaging", "unmet"),
        [
            (NEAREST, NEAREST_MEAN, ()),
            (replace(NEAREST, dimension=73), NEAREST_MEAN, ("d",)),
            (NEAREST, NearestMean(83), ("K >= 9 log(m/delta)",)),
            (NEAREST, NearestMean(256), ("K < m_k",)),
            (replace(NEAREST, sigma=1.0), NEAREST_MEAN, ("r > 2 sigma",)),  # although the formula for d has a value
            (SOFTMAX, SOFTMAX_MEAN, ()),
            (replace(SOFTMAX, dimension=10**6), SOFTMAX_MEAN, ("d",)),
            (SOFTMAX, SoftmaxMean(3.0), ("lambda",)),
            (replace(SOFTMAX, separation=0.9), SOFTMAX_MEAN, ("r near sqrt 2",)),
            (replace(SOFTMAX, clusters=2, separation=2.0), SOFTMAX_MEAN, ("r near sqrt 2",)),
            (replace(SOFTMAX, sigma=1.1), SOFTMAX_MEAN, ("sigma <= 1",)),
            (replace(SOFTMAX, members=9), SOFTMAX_MEAN, ("C << m",)),
        ],
    )
    def test_a_violated_condition_is_named(self, setting: Setting, averaging: Averaging, unmet: tuple) -> None:
        (row,) = measure(setting, [averaging], seed=0, trials=1)
        assert row.unmet == unmet
        assert row.record()["unmet"] == list(unmet)
        assert row.verdict in (("loose", "silent") if unmet else ("holds", "fails"))


class TestVerdicts:
    def test_the_claims_are_judged_input_by_input(self) -> None:
        before, after = np.array([1.0, 1.0, 0.4]), np.array([0.9, 0.5, 0.5])
        setting = Setting(8, 1, 3, 1.0)
        assert NearestMean(2).claim(setting, before, after).tolist() == [True, True, False]
        assert SoftmaxMean(1.0).claim(setting, before, after).tolist() == [False, True, True]

    def test_theorem_2_has_a_counterexample(self) -> None:
        """All conditions met, and an input that attends to itself keeps its noise; without j = i the claim is true."""
        setting, lam = least_setting(4, 64, 1.0)
        with_itself, without = measure(setting, [SoftmaxMean(lam), SoftmaxMean(lam, itself=False)], seed=0, trials=5)
        assert (with_itself.verdict, with_itself.unmet, with_itself.claim_rate) == ("fails", (), 0.0)
        assert with_itself.itself > 0.99
        assert with_itself.after > 0.99
        assert (without.verdict, without.itself) == ("holds", 0.0)
        assert without.after == pytest.approx(1 / math.sqrt(63), rel=0.01)

    def test_true_without_its_conditions_or_rightly_not_claimed(self) -> None:
        wide, small = Setting(200, 2, 256, 1.0), Setting(200, 8, 64, 0.25)
        assert measure(wide, [NEAREST_MEAN], seed=0, trials=2)[0].verdict == "loose"
        (row,) = measure(small, [NEAREST_MEAN], seed=0, trials=2)
        assert (row.verdict, row.unmet) == ("silent", ("K < m_k",))
        assert row.own == pytest.approx(0.64)

    def test_a_bound_below_the_noise_is_counted_as_false(self) -> None:
        (row,) = measure(Setting(PAST_ALL_CONDITIONS, 4, 64, 0.25), [SoftmaxMean(30.0)], seed=0, trials=2)
        assert (row.verdict, row.claim_rate, row.bound_rate) == ("holds", 1.0, 0.0)

    def test_the_same_seed_gives_the_same_row(self) -> None:
        rows = [measure(NEAREST, [NEAREST_MEAN], seed=seed, trials=2)[0] for seed in (1, 1, 2)]
        assert rows[0] == rows[1]
        assert rows[0].after != rows[2].after


class TestProofSteps:
    def test_lemma_1_is_false_for_separated_centres(self) -> None:
        wrong, right = lemma_1(1.0), lemma_1(0.5)
        assert (wrong["cosine"], wrong["holds"]) == (0.5, False)  # 60 degrees
        assert wrong["lemma"] == pytest.approx(0.41421, rel=1e-4)
        assert (right["cosine"], right["holds"]) == (0.875, True)

    def test_lemma_2_is_true_of_two_inputs_and_false_of_one(self) -> None:
        setting = least_setting(4, 64, 1.0)[0]
        found = lemma_2(setting, seed=0)
        assert 0.4 < found["apart"] < 1
        allowed = 2 * math.sqrt(math.log(256 / 0.1) / setting.dimension)
        assert found["same"] == pytest.approx(1 / allowed, rel=0.01)  # |h_i|^2 is sigma^2

    def test_the_shell_against_the_normal_law(self) -> None:
        """For large d a length is N(1, 1/(2d)), and the shell's half-width sqrt(log(m/delta)) of its deviations."""
        outside = math.erfc(math.sqrt(math.log(64 / 0.05) / 2))
        assert shell(64, 10**4, seed=0)["left"] == pytest.approx(1 - (1 - outside) ** 64, abs=0.06)
        assert shell(64, 58, seed=0)["left"] > 0.2

    def test_what_theorem_2_asks_of_a_vision_transformer(self) -> None:
        found = least_dimension(2, 1.0)
        assert found["lambda"] == pytest.approx(7.742, abs=1e-3)  # 2 log 48
        assert found["dimension"] == pytest.approx(6400 * 7.7424**2 * math.log(2 * 196 / 0.05), rel=1e-3)

    def test_how_large_a_cluster_must_be(self) -> None:
        """The weight of itself is exp(lambda sigma^2) = 48^2 = 2304 beside m_k - 1."""
        itself = 2304 / (2304 + 1023)
        assert limit(1.0, 1024)["noise_over_sigma"] == pytest.approx(itself, rel=0.01)


class TestCommand:
    @pytest.mark.slow
    def test_end_to_end(self, simulated: Simulate, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
        first = simulated(tmp_path / "a" / "b")
        assert sorted(p.name for p in (tmp_path / "a" / "b").iterdir()) == FILES
        printed = capsys.readouterr().out
        assert all(column in printed for column in SHOWN)
        assert "sigma = 1, as asked " in printed
        assert re.search(r"Theorem 2: \d+ settings", printed)

        simulated(tmp_path / "again", "--quiet")
        for name in FILES:
            assert (tmp_path / "a" / "b" / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name
        assert first.keys() == {"seed", "delta", "trials", "summary", "cases", "panels", "proof_steps"}
        assert (first["seed"], first["delta"], first["trials"]) == (0, 0.05, 1)
        assert first["panels"].keys() == {point.panel for point in (*nearest_panels(), *softmax_panels())}
        assert sum(len(curve) for panel in first["panels"].values() for curve in panel.values()) == 11 + 20
        case = first["cases"]["sigma = 1, as asked"]
        assert (case["theorem"], case["verdict"], case["averaging"]["itself"]) == (2, "fails", True)

        monkeypatch.setattr(study, "draw_figures", lambda study, out: None)
        other = simulated(tmp_path / "other", "--seed", "1")
        assert other["cases"]["as asked"]["after"] != first["cases"]["as asked"]["after"]

    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            (["--out", "file"], "'file' is a file"),
            (["--out", "file/below"], "Not a directory"),
            ([], "--out"),
            (["--out", ".", "--seed", "-1"], "--seed"),
        ],
    )
    def test_bad_input_is_refused(
        self, flags: list[str], words: str, tmp_path: Path, capsys: Any, monkeypatch: Any
    ) -> None:
        monkeypatch.chdir(tmp_path)
        Path("file").write_text("mine")
        monkeypatch.setattr(sys, "argv", ["research.theory", *flags])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 2
        assert words in capsys.readouterr().err
        assert [p.name for p in tmp_path.iterdir()] == ["file"]
        assert Path("file").read_text() == "mine"


class TestPage:
    @pytest.mark.slow
    def test_the_table_is_what_the_command_prints(self) -> None:
        """Every row of docs/theory.md, simulated anew; the last digit may differ, as sums round differently."""
        made = simulate(tuple(cases()), seed=0, trials=TRIALS, screen=Screen(quiet=True))
        lines = (DOCS / "theory.md").read_text().splitlines()
        rows = [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in lines if line.startswith("| ")]
        start = rows.index(COLUMNS)
        written, table = rows[start + 1 : start + 1 + len(made.table())], made.table()
        for ours, theirs in zip(written, table, strict=True):
            assert ours[:6] == theirs[:6]
            assert [float(v) for v in ours[6:10]] == pytest.approx([float(v) for v in theirs[6:10]], abs=0.0011)
            assert ours[10:] == theirs[10:]

    def test_its_figures_are_there(self) -> None:
        shown = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", (DOCS / "theory.md").read_text())
        assert sorted(shown) == [f"theory/{name}" for name in FILES if name.endswith(".svg")]
        assert all((DOCS / name).is_file() for name in shown)
