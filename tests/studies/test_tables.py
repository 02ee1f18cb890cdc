"""Tables of made-up results, against their stored renderings. After a change that is meant, look at the new ones and
write them with `python tests/studies/test_tables.py`."""

from pathlib import Path

import pytest

from cdtrans.inputs.benchmarks import DOMAINNET, OFFICE31, VISDA2017, Benchmark, FoundBenchmark, FoundDomain
from cdtrans.inputs.scan import LabelledDomain
from cdtrans.studies.results import SCORE_TITLES, BenchResults, RunResult
from cdtrans.studies.tables import Document, latex, markdown, paper_layout
from support import says

STORED = Path(__file__).parent / "tables"
SEEDS = (1234, 1, 2)
BACKBONE = "deit_small_distilled_patch16_224.fb_in1k"


def found(benchmark: Benchmark, layout: str, differences: tuple[str, ...] = ()) -> FoundBenchmark:
    images = LabelledDomain(Path("data"), ("a/1.jpg", "b/2.jpg"), (0, 1), ("a", "b"))
    domains = {d.name: FoundDomain(d.name, images, None, layout.format(d.name)) for d in benchmark.domains}
    return FoundBenchmark(benchmark, Path("data"), domains, differences)


def result(benchmark: Benchmark, task: str, seed: int, score: float) -> RunResult:
    """The four kinds a percent apart; every class as far from the mean as its number, which leaves the mean alone."""
    scores = {kind: score + 0.01 * n for n, kind in enumerate(SCORE_TITLES)}
    middle = (len(benchmark.class_names) - 1) / 2
    per_class = {
        kind: {name: value + 0.001 * (k - middle) for k, name in enumerate(benchmark.class_names)}
        for kind, value in scores.items()
    }
    return RunResult(
        task=task,
        seed=seed,
        run=f"{task}/{seed}",
        stage_1=f"{next(t.name for t in benchmark.tasks if t.source.short == task.split('>')[0])}/{seed}",
        backbone=BACKBONE,
        device="cuda: GPU",
        images=100,
        target_images=100,
        scores=scores,
        class_means=scores,
        per_class=per_class,
        epochs={"label_free": 9, "best_by_labels": 7},
        curve=[],
        seconds=600.0,
        device_seconds=300.0,
        peak_memory=None,
    )


def results(benchmark: Benchmark, seeds: tuple[int, ...] = SEEDS) -> list[RunResult]:
    tasks = enumerate(benchmark.tasks)
    return [result(benchmark, t.name, s, 0.5 + 0.01 * n + 0.02 * i) for n, t in tasks for i, s in enumerate(seeds)]


def document(data: FoundBenchmark, results: list[RunResult], seeds: tuple[int, ...] = SEEDS) -> Document:
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


def row(text: str, start: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(f"| {start} |"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_mean_and_deviation_are_those_of_the_seeds() -> None:
    """Scores of 50, 52 and 54 percent for A>D, one more for each task: mean 52, deviation 2; overall 54.5."""
    cells = row(tables()["office31.md"], "source only")
    assert cells == [*(f"{52 + n}.0 ± 2.0" for n in range(6)), "54.5 ± 2.0"]


def test_a_half_finished_table_has_no_mean_and_says_what_is_missing() -> None:
    text = tables()["office31-half.md"]
    assert row(text, "source only")[:2] == ["52.0 ± 2.0", "–"]
    assert row(text, "source only")[2] == "53.0 ± 1.4"  # two seeds: 52 and 54
    assert row(text, "source only")[-1] == "–"
    assert says(text, "unfinished", "4 of 18 runs", "A>W seed 1234, A>W seed 1, A>W seed 2, D>A seed 2")
    assert says(text, "not the published data", "amazon lacks 'x_y'")


def test_the_averages_of_a_grid() -> None:
    """The n-th of the 30 tasks has 50 + n percent."""
    text = tables()["domainnet.md"].split("| source only |")[1]
    assert row(text, "clp") == ["-", "50.0", "51.0", "52.0", "53.0", "54.0", "52.0"]
    assert row(text, "inf") == ["55.0", "-", "56.0", "57.0", "58.0", "59.0", "57.0"]
    assert row(text, "Avg.")[:2] == ["65.0", "64.8"]  # means of 55, 60, 65, 70, 75 and 50, 61, 66, 71, 76
    assert row(text, "Avg.")[-1] == "64.5"


def test_a_seed_counts_for_a_mean_only_with_all_its_tasks() -> None:
    some = [r for r in results(OFFICE31) if r.seed != 2 or r.task == "A>D"]
    text = markdown(document(found(OFFICE31, "folder {}"), some))
    assert row(text, "source only")[0] == "52.0 ± 2.0"
    assert row(text, "source only")[-1] == "53.5 ± 1.4"


def test_no_result_yet() -> None:
    table = document(found(OFFICE31, "folder {}"), [], (1234,))
    assert says(latex(table), "unfinished", "6 of 6 runs")
    assert "Cost" not in markdown(table)


if __name__ == "__main__":
    for file_name, content in tables().items():
        (STORED / file_name).write_text(content, encoding="utf-8")
