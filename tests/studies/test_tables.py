"""Tables of made-up results: one method's against their stored renderings; comparisons: the test against CDTrans by
hand, the rows, and their renderings. After a change that is meant, look at the new stored ones and write them with
`PYTHONPATH=src:tests python tests/studies/test_tables.py`."""

import csv
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from cdtrans.inputs.benchmarks import DOMAINNET, OFFICE31, PACS, VISDA2017, Benchmark, FoundBenchmark, FoundDomain
from cdtrans.inputs.scan import LabelledDomain
from cdtrans.paper.printed_tables import printed_means
from cdtrans.studies.comparison import MethodRow, comparison_document, csv_table, html_page, method_rows, signed_rank_p
from cdtrans.studies.results import SCORE_TITLES, BenchResults, RunResult
from cdtrans.studies.tables import Document, latex, markdown, paper_layout
from support import says

SEEDS = (1234, 1)


def result(benchmark: Benchmark, task: str, seed: int, method: str, score: float, **changed: object) -> RunResult:
    """Source only has 50%, the last epoch a percent less and the best one a percent more than the choice."""
    by_kind = {"source_only": 0.5, "last_epoch": score - 0.01, "label_free": score, "best_by_labels": score + 0.01}
    names = {"task": task, "seed": seed, "run": f"{method}/{task}/{seed}", "stage_1": f"cdtrans/{task}/{seed}"}
    facts = {"backbone": "vit", "device": "cuda: GPU", "images": 100, "target_images": 100, "epochs": {}}
    per_class = {kind: dict.fromkeys(benchmark.class_names, by_kind[kind]) for kind in SCORE_TITLES}
    scores = {
        "scores": by_kind,
        "class_means": by_kind,
        "per_class": per_class,
        "curve": [0.5, score + 0.01, score - 0.01],
    }
    cost = {"seconds": 120.0, "device_seconds": 60.0, "peak_memory": 3 * 2**30}
    values: dict = {**names, **facts, **scores, **cost, **changed}
    return RunResult(**values)


def compared(methods: dict[str, float], benchmark: Benchmark = OFFICE31, **changed: object) -> BenchResults:
    """Methods by how much better they are than 60% on the first task, a percent more on each further one; the second
    seed has two percent more."""
    results = {
        method: [
            result(benchmark, task.name, seed, method, 0.6 + gain + 0.01 * n + 0.02 * i)
            for n, task in enumerate(benchmark.tasks)
            for i, seed in enumerate(SEEDS)
        ]
        for method, gain in methods.items()
    }
    given: dict = {
        **{"data": FoundBenchmark(benchmark, Path("d"), {}, ()), "seeds": SEEDS, "start": "best", "backbone": "vit"},
        **{"tasks": tuple(task.name for task in benchmark.tasks), "by_method": results},
    }
    return BenchResults(**given | changed)


def rows_of(methods: dict[str, float], benchmark: Benchmark = OFFICE31, **changed: object) -> list[MethodRow]:
    return method_rows(compared(methods, benchmark, **changed))


def rendered(bench: BenchResults, ending: str) -> str:
    rows = method_rows(bench)
    document = comparison_document(bench, rows)
    return {
        "md": markdown(document),
        "tex": latex(document),
        "csv": csv_table(bench, rows),
        "html": html_page(document, rows),
    }[ending]


def row_of(text: str, start: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(f"| {start} |"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


class TestSignedRanks:
    @pytest.mark.parametrize(
        ("differences", "p"),
        [
            ([1, 2, 3, 4, 5, 6], 2 / 64),
            ([-1, -2, -3, -4, -5, -6], 2 / 64),
            ([1, 2, 3, 4, -5], 20 / 32),  # ten sets of 1 ... 5 have a sum of at most 5
            ([1, 1, 1, -1], 10 / 16),  # all ranks 2.5: none or one of four negative
            ([0, 1, 2], 2 / 4),  # an equal pair says nothing
            ([3, -3], 1.0),
        ],
    )
    def test_by_hand(self, differences: list[float], p: float) -> None:
        assert signed_rank_p(differences) == pytest.approx(p)

    def test_nothing_to_compare(self) -> None:
        assert signed_rank_p([]) is None
        assert signed_rank_p([0.0, 0.0]) is None

    def test_equal_differences_tie_in_spite_of_rounding(self) -> None:
        assert 0.3 - 0.2 != 0.2 - 0.1
        assert signed_rank_p([-(0.3 - 0.2), 0.2 - 0.1, 0.5, 0.6, 0.7]) == pytest.approx(6 / 32)

    @given(st.lists(st.integers(-4, 4).filter(bool), min_size=1, max_size=8))
    def test_against_every_toss_of_the_signs(self, d: list[int]) -> None:
        sizes = sorted(map(abs, d))
        ranks = np.array([np.mean([i + 1 for i, size in enumerate(sizes) if size == abs(x)]) for x in d])
        sums = [ranks[np.array(signs) > 0].sum() for signs in product((-1, 1), repeat=len(d))]
        found = min(ranks[np.array(d) > 0].sum(), ranks[np.array(d) < 0].sum())
        assert signed_rank_p(d) == pytest.approx(min(1, 2 * np.mean([s <= found for s in sums])))


class TestRows:
    def test_means_deviations_and_the_difference(self) -> None:
        source, cdtrans, mcc = rows_of({"cdtrans": 0.0, "mcc": 0.03})
        assert str(source.means["source_only"]) == "50.0 ± 0.0"
        assert str(cdtrans.means["label_free"]) == "63.5 ± 1.4"  # 60 to 65, and 62 to 67
        assert str(mcc.means["last_epoch"]) == "65.5 ± 1.4"
        assert str(mcc.means["best_by_labels"]) == "67.5 ± 1.4"
        assert str(mcc.by_column["A>W"]) == "65.0 ± 1.4"
        assert (cdtrans.difference, cdtrans.p) == (None, None)
        assert mcc.difference == pytest.approx(3)
        assert mcc.p == pytest.approx(2 / 2**12)
        assert source.difference == pytest.approx(50 - 63.5)

    def test_only_runs_of_the_same_task_and_seed_are_paired(self) -> None:
        both = compared({"cdtrans": 0.0, "mcc": 0.03})
        few = {**both.by_method, "mcc": [r for r in both.by_method["mcc"] if (r.task, r.seed) != ("A>W", 1)]}
        row = rows_of({}, by_method={**few, "cdtrans": both.by_method["cdtrans"][1:]})[2]
        assert (row.pairs, row.note) == (10, "1 of 12 to run")
        assert str(row.means["label_free"]) == "65.5", "the other seed lacks a task"

    def test_notes_say_why_a_row_is_not_complete(self) -> None:
        both = compared({"cdtrans": 0.0, "dann": 0.01})
        results = {"cotraining": (), "cdtrans": (), "dann": both.by_method["dann"][:9], "cdan_tn": ()}
        why = {"failed": {"dann": 2}, "misfits": {"cdan_tn": "needs BatchNorm"}, "start": "authors"}
        notes = [row.note for row in rows_of({}, by_method=results, **why)]
        assert notes == [
            *("", "12 of 12 to run; starts with its own recipe", "12 of 12 to run"),
            *("2 of 12 failed; 1 of 12 to run", "needs BatchNorm"),
        ]

    def test_source_only_is_that_of_the_common_start(self) -> None:
        both = compared({"cotraining": 0.1, "cdtrans": 0.0})
        other = [result(OFFICE31, r.task, r.seed, "cotraining", 0.7) for r in both.by_method["cotraining"]]
        for r in other:
            r.scores["source_only"] = 0.9
        results = {"cdtrans": both.by_method["cdtrans"], "cotraining": other}
        source = rows_of({}, by_method=results, start="authors")[0]
        assert str(source.means["source_only"]) == "50.0 ± 0.0"

    def test_minutes_are_of_runs_that_found_stage_1_ready(self) -> None:
        ran = [
            result(OFFICE31, "A>D", 1, "cdtrans", 0.6, stage_1="cdtrans/A>D/1", device_seconds=600.0),
            result(OFFICE31, "A>W", 1, "cdtrans", 0.6, stage_1="cdtrans/A>D/1", device_seconds=90.0),
        ]
        assert rows_of({}, by_method={"cdtrans": ran})[1].minutes == pytest.approx(1.5)
        assert rows_of({}, by_method={"cdtrans": ran[:1]})[1].minutes == pytest.approx(10)

    def test_memory_is_the_most_of_all_runs_and_unknown_on_a_cpu(self) -> None:
        ran = [result(OFFICE31, "A>D", 1, "mcc", 0.6, peak_memory=n and n * 2**30) for n in (None, 2, 5)]
        assert rows_of({}, by_method={"mcc": ran})[1].memory == 5
        assert rows_of({}, by_method={"mcc": ran[:1]})[1].memory is None

    def test_a_curve_is_the_mean_of_the_seeds_that_have_every_task(self) -> None:
        both = compared({"mcc": 0.0})
        assert method_rows(both)[1].curve == pytest.approx([50, 64.5, 62.5])
        one = [r for r in both.by_method["mcc"] if (r.task, r.seed) != ("A>W", 1)]
        assert rows_of({}, by_method={"mcc": one})[1].curve == pytest.approx([50, 63.5, 61.5])
        none = [r for r in both.by_method["mcc"] if r.task != "A>W"]
        assert rows_of({}, by_method={"mcc": none})[1].curve == ()

    def test_there_is_no_picture_of_runs_that_broke_off_in_their_first_epoch(self) -> None:
        runs = [replace(run, curve=[0.5]) for run in compared({"mcc": 0.0}).by_method["mcc"]]
        assert "<polyline" not in rendered(compared({}, by_method={"mcc": runs}), "html")

    def test_what_the_paper_does_not_have_has_no_printed_mean(self) -> None:
        comparison = compared({"cdtrans": 0.0}, PACS)
        assert method_rows(comparison)[1].printed == ()
        assert "printed means" not in rendered(comparison, "md")

    def test_visda_is_scored_by_its_classes(self) -> None:
        comparison = compared({"cdtrans": 0.0}, VISDA2017)
        assert comparison.columns == VISDA2017.class_names
        assert str(method_rows(comparison)[1].by_column["truck"]) == "61.0 ± 1.4"


class TestRenderings:
    two = compared({"cdtrans": 0.0, "shot": -0.02})

    def test_markdown(self) -> None:
        text = rendered(self.two, "md")
        rows = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| ")]
        assert rows[:5] == ["| method", "| ---", "| source only", "| CDTrans", "| shot"]
        assert row_of(text, "source only")[:5] == ["50.0 ± 0.0", "50.0 ± 0.0", "–", "-13.5 (p < 0.001)", "–"]
        paper = "88.6 ResNet-50; 88.8 ResNet-50, rerun; 91.4 DeiT-B"
        assert row_of(text, "shot") == [
            *("60.5 ± 1.4", "61.5 ± 1.4", "62.5 ± 1.4", "-2.0 (p < 0.001)", "1.00", "3.0", paper, "")
        ]
        assert row_of(text.split("## The label-free choice by task")[1], "shot")[:2] == ["59.0 ± 1.4", "60.0 ± 1.4"]
        assert says(text, "best epoch by target labels*", "*Uses target labels")

    def test_csv_has_the_same_numbers_in_full(self) -> None:
        source, cdtrans, shot = csv.DictReader(rendered(self.two, "csv").splitlines())
        assert float(shot["label_free"]) == pytest.approx(61.5)
        assert float(shot["label_free_deviation"]) == pytest.approx(2**0.5)
        assert float(shot["p"]) == pytest.approx(2 / 2**12)
        assert (source["method"], source["best_by_labels"], cdtrans["p"]) == ("source_only", "", "")
        assert float(shot["A>W"]) == pytest.approx(60)

    def test_latex_is_balanced(self) -> None:
        text = rendered(compared({"cdtrans": 0.0, "safn_ent": 0.0}), "tex")
        assert text.count("{") == text.count("}")
        assert not set("±–°>") & set(text)
        assert "(p $<$ 0.001)" in text
        assert "safn\\_ent" in text
        for body in re.findall(r"\\hline\n(.*?)\\end{tabular}", text, flags=re.DOTALL):
            assert len({line.count(" & ") for line in body.splitlines() if line != "\\hline"}) == 1

    def test_the_page_shows_the_best_first_and_the_bars_where_they_belong(self) -> None:
        text = rendered(compared({"cdtrans": 0.0, "shot": -0.16, "mcc": 0.03}), "html")
        bars = re.findall(r'<li><span>(\w+)</span>.*?<i( class="worse")? style="left:([\d.]+)%;width:([\d.]+)%', text)
        # The scale is from 45 to 70, source only is 50: a fifth of it.
        assert bars == [
            ("mcc", "", "20.00", "66.00"),
            ("CDTrans", "", "20.00", "54.00"),
            ("shot", ' class="worse"', "10.00", "10.00"),
        ]
        assert "<span>45%</span>" in rendered(compared({"cdtrans": 0.0}), "html"), "source only is not at the edge"

    def test_the_page_draws_the_curves_on_one_scale(self) -> None:
        text = rendered(compared({"cdtrans": 0.0, "mcc": 0.03}), "html")
        drawn = re.findall(
            r'<li><span>(\w+)</span><span class="number">([\d.]+)</span><svg .*?y1="([\d.]+)".*?points="(.*?)"', text
        )
        # From 45 to 70 in a box of 100 x 50: a percent is 2 high; source only is 40 below the top.
        assert drawn == [
            ("mcc", "65.5", "40.0", "0.0,40.0 50.0,5.0 100.0,9.0"),
            ("CDTrans", "62.5", "40.0", "0.0,40.0 50.0,11.0 100.0,15.0"),
        ]
        assert "<svg" not in rendered(compared({}, by_method={"cdtrans": ()}), "html")

    def test_names_are_escaped_in_the_page(self) -> None:
        assert "<b>&amp;" not in rendered(compared({"cdtrans": 0.0}, backbone="<b>&"), "html")
        assert "&lt;b&gt;&amp;" in rendered(compared({"cdtrans": 0.0}, backbone="<b>&"), "html")

    def test_no_result_yet(self) -> None:
        nothing = compared({}, by_method={"cdtrans": (), "dann": ()})
        assert row_of(rendered(nothing, "md"), "dann") == ["–"] * 6 + ["82.2 ResNet-50", "12 of 12 to run"]
        assert says(rendered(nothing, "html"), "12 of 12 to run")
        assert rendered(nothing, "tex")
        assert rendered(nothing, "csv")

    def test_without_cdtrans_there_is_no_test_and_the_text_says_so(self) -> None:
        text = rendered(compared({"dann": 0.0}), "md")
        assert row_of(text, "dann")[3] == "–"
        assert says(text, "CDTrans is not among the methods")

    def test_data_that_are_not_the_published_and_tasks_that_are_not_all(self) -> None:
        odd = FoundBenchmark(OFFICE31, Path("d"), {}, ("amazon lacks 'x'",))
        text = rendered(compared({"dann": 0.0}, data=odd, tasks=("A>D", "A>W")), "md")
        assert says(text, "not the published data: amazon lacks 'x'", "mean of the tasks A>D, A>W only")


def test_the_printed_means_are_those_of_the_tables() -> None:
    """Against the fact sheet, typed in by hand."""
    assert printed_means("office31")["shot"] == (
        *(("88.6", "ResNet-50"), ("88.8", "ResNet-50, rerun"), ("91.4", "DeiT-B")),
    )
    assert printed_means("office31")["tvt"] == (("93.8", "ViT-B/16, ImageNet-21k"),)
    assert printed_means("office-home")["source_only"][0] == ("59.4", "ResNet-50")
    assert printed_means("visda2017")["source_only"] == (("52.4", "ResNet-101"), ("67.1", "DeiT-B"))
    assert printed_means("visda2017")["mrkld_lrent"] == (("83.3", "DeiT-B"),)
    assert printed_means("domainnet")["cdtrans"] == (("39.9", "DeiT-S"), ("45.2", "DeiT-B"))


STORED = Path(__file__).parent / "tables"
THREE = (1234, 1, 2)
BACKBONE = "deit_small_distilled_patch16_224.fb_in1k"


def found(benchmark: Benchmark, layout: str, differences: tuple[str, ...] = ()) -> FoundBenchmark:
    images = LabelledDomain(Path("data"), ("a/1.jpg", "b/2.jpg"), (0, 1), ("a", "b"))
    domains = {d.name: FoundDomain(d.name, images, None, layout.format(d.name)) for d in benchmark.domains}
    return FoundBenchmark(benchmark, Path("data"), domains, differences)


def seed_result(benchmark: Benchmark, task: str, seed: int, score: float) -> RunResult:
    """The four kinds a percent apart; every class as far from the mean as its number, which leaves the mean alone."""
    scores = {kind: score + 0.01 * n for n, kind in enumerate(SCORE_TITLES)}
    middle = (len(benchmark.class_names) - 1) / 2
    per_class = {
        kind: {name: value + 0.001 * (k - middle) for k, name in enumerate(benchmark.class_names)}
        for kind, value in scores.items()
    }
    first = next(t.name for t in benchmark.tasks if t.source.short == task.split(">")[0])
    scored = {"scores": scores, "class_means": scores, "per_class": per_class}
    times = {"stage_1": f"cdtrans/{first}/{seed}", "seconds": 600.0, "device_seconds": 300.0}
    return result(benchmark, task, seed, "cdtrans", score, **scored, **times)


def results(benchmark: Benchmark, seeds: tuple[int, ...] = THREE) -> list[RunResult]:
    tasks = enumerate(benchmark.tasks)
    return [seed_result(benchmark, t.name, s, 0.5 + 0.01 * n + 0.02 * i) for n, t in tasks for i, s in enumerate(seeds)]


def document(data: FoundBenchmark, results: list[RunResult], seeds: tuple[int, ...] = THREE) -> Document:
    tasks = tuple(task.name for task in data.benchmark.tasks)
    return paper_layout(BenchResults(data, seeds, tasks, BACKBONE, {"cdtrans": results}))


def tables() -> dict[str, str]:
    """The expected content of the stored files."""
    whole = document(found(OFFICE31, "folder {}/images"), results(OFFICE31))
    few = [r for r in results(OFFICE31) if r.task != "A>W" and (r.task, r.seed) != ("D>A", 2)]
    half = document(found(OFFICE31, "list {}_list.txt", ("amazon lacks 'x_y'",)), few)
    visda = document(found(VISDA2017, "folder {}"), results(VISDA2017))
    lists = found(DOMAINNET, "lists {0}_train.txt and {0}_test.txt together")
    domainnet = document(lists, results(DOMAINNET, (1234,)), (1234,))
    return {
        "office31.md": markdown(whole),
        "office31.tex": latex(whole),
        "office31-half.md": markdown(half),
        "visda2017.md": markdown(visda),
        "visda2017.tex": latex(visda),
        "domainnet.md": markdown(domainnet),
        "domainnet.tex": latex(domainnet),
    }


@pytest.mark.parametrize("name", tables())
def test_the_rendering_is_the_stored_one(name: str) -> None:
    assert tables()[name] == (STORED / name).read_text(encoding="utf-8")


def test_mean_and_deviation_are_those_of_the_seeds() -> None:
    """Scores of 50, 52 and 54 percent for A>D, one more for each task: mean 52, deviation 2; overall 54.5."""
    cells = row_of(tables()["office31.md"], "source only")
    assert cells == [*(f"{52 + n}.0 ± 2.0" for n in range(6)), "54.5 ± 2.0"]


def test_a_half_finished_table_has_no_mean_and_says_what_is_missing() -> None:
    text = tables()["office31-half.md"]
    assert row_of(text, "source only")[:2] == ["52.0 ± 2.0", "–"]
    assert row_of(text, "source only")[2] == "53.0 ± 1.4"  # two seeds: 52 and 54
    assert row_of(text, "source only")[-1] == "–"
    assert says(text, "unfinished", "4 of 18 runs", "A>W seed 1234, A>W seed 1, A>W seed 2, D>A seed 2")
    assert says(text, "not the published data", "amazon lacks 'x_y'")


def test_the_averages_of_a_grid() -> None:
    """The n-th of the 30 tasks has 50 + n percent."""
    text = tables()["domainnet.md"].split("| source only |")[1]
    assert row_of(text, "clp") == ["-", "50.0", "51.0", "52.0", "53.0", "54.0", "52.0"]
    assert row_of(text, "inf") == ["55.0", "-", "56.0", "57.0", "58.0", "59.0", "57.0"]
    assert row_of(text, "Avg.")[:2] == ["65.0", "64.8"]  # means of 55, 60, 65, 70, 75 and 50, 61, 66, 71, 76
    assert row_of(text, "Avg.")[-1] == "64.5"


def test_a_seed_counts_for_a_mean_only_with_all_its_tasks() -> None:
    some = [r for r in results(OFFICE31) if r.seed != 2 or r.task == "A>D"]
    text = markdown(document(found(OFFICE31, "folder {}"), some))
    assert row_of(text, "source only")[0] == "52.0 ± 2.0"
    assert row_of(text, "source only")[-1] == "53.5 ± 1.4"


def test_no_result_of_one_method_yet() -> None:
    table = document(found(OFFICE31, "folder {}"), [], (1234,))
    assert says(latex(table), "unfinished", "6 of 6 runs")
    assert "Cost" not in markdown(table)


if __name__ == "__main__":
    for file_name, content in tables().items():
        (STORED / file_name).write_text(content, encoding="utf-8")
