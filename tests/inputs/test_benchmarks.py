"""The benchmarks: task names, every layout on disk, and folders that are none."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from cdtrans.inputs.benchmarks import (
    ARROWS,
    BENCHMARKS,
    DOMAINNET,
    OFFICE31,
    VISDA2017,
    Benchmark,
    Domain,
    FoundBenchmark,
    benchmark_named,
    find_benchmark,
)
from support import raises

SMALL = Benchmark(
    "small", "Small-3", (Domain("A", "amazon", 4), Domain("D", "dslr", 4), Domain("R", "Real_World", 4)), classes=2
)


def touch(file: Path) -> Path:
    """No test here looks into an image."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    return file


def fill(folder: Path, classes: tuple[str, ...] = ("mug", "pen"), each: int = 2) -> Path:
    for name in classes:
        for n in range(each):
            touch(folder / name / f"{n}.jpg")
    return folder


def folders(data: Path) -> Path:
    for name in ("amazon", "dslr", "Real_World"):
        fill(data / name)
    return data


def find(data: Path, benchmark: Benchmark = SMALL, **how: bool) -> FoundBenchmark:
    return find_benchmark(benchmark, data, benchmark.tasks, **how)


class TestTasks:
    def test_the_tasks_are_those_of_the_paper_s_columns(self) -> None:
        assert [task.name for task in OFFICE31.tasks] == ["A>D", "A>W", "D>A", "D>W", "W>A", "W>D"]
        assert [task.name for task in VISDA2017.tasks] == ["S>R"]
        assert {name: len(benchmark.tasks) for name, benchmark in BENCHMARKS.items()} == {
            **{"office31": 6, "office-home": 12, "visda2017": 1, "domainnet": 30, "pacs": 12}
        }

    @given(st.data())
    def test_every_spelling_of_a_task_is_that_task(self, data: st.DataObject) -> None:
        benchmark = data.draw(st.sampled_from(list(BENCHMARKS.values())))
        task = data.draw(st.sampled_from(benchmark.tasks))
        ends = [data.draw(st.sampled_from((d.short, d.name, *d.aliases))) for d in task]
        spelt = [data.draw(st.sampled_from((end, end.upper(), end.lower(), f" {end} "))) for end in ends]
        spelt = [end.replace("_", data.draw(st.sampled_from(("_", " ", "")))) for end in spelt]
        assert benchmark.task(data.draw(st.sampled_from((*ARROWS, "->"))).join(spelt)) is task

    @pytest.mark.parametrize("text", ["A>A", "A>X", "A", "", ">", "A>W>D", "Ar>Cl", "amazon>webcan"])
    def test_no_task_of_office31(self, text: str) -> None:
        with raises("task-unknown"):
            OFFICE31.task(text)

    def test_an_unknown_benchmark(self) -> None:
        with raises("benchmark-unknown"):
            benchmark_named("office")
        assert benchmark_named("domainnet") is DOMAINNET


class TestFolders:
    @pytest.mark.parametrize("above", ["", "OfficeHomeDataset_10072016"])
    @pytest.mark.parametrize("place", ["Real World", "Real_World", "RealWorld", "real-world", "Real_World/images"])
    def test_class_folders_and_lists_in_every_layout(self, tmp_path: Path, above: str, place: str) -> None:
        touch(tmp_path / "__MACOSX" / "x.txt")
        root = tmp_path / above
        for name in ("amazon", "dslr", place):
            fill(root / name)
        found = find(tmp_path)
        domain = found.domains["Real_World"]
        assert (found.root, found.differences, len(domain.images)) == (root, (), 4)
        assert (domain.folder, domain.layout, domain.images.classes) == (
            root / place,
            f"folder {place}",
            ("mug", "pen"),
        )
        (root / "Real_World.txt").write_text("./Real_World/pen/0.jpg 0\n./Real_World/mug/0.jpg 1\n")
        listed = find(tmp_path, allow_incomplete=True).domains["Real_World"]
        assert listed.images.paths == (f"{place}/pen/0.jpg", f"{place}/mug/0.jpg")

    def test_office31_complete_and_with_an_image_less(self, tmp_path: Path) -> None:
        for domain in OFFICE31.domains:
            for name, images in domain.per_class.items():
                fill(tmp_path / domain.name / "images", (name,), images)
        assert {name: len(d.images) for name, d in find(tmp_path, OFFICE31).domains.items()} == {
            **{"amazon": 2817, "dslr": 498, "webcam": 795}
        }
        (tmp_path / "dslr" / "images" / "mug" / "3.jpg").unlink()
        with raises("benchmark-differs"):
            find(tmp_path, OFFICE31)
        (difference,) = find(tmp_path, OFFICE31, allow_incomplete=True).differences
        assert difference == "dslr has 497 images where 498 were published (mug 7 of 8)"
        touch(tmp_path / "dslr" / "images" / "pen" / "one_more.jpg")
        (difference,) = find(tmp_path, OFFICE31, allow_incomplete=True).differences
        assert difference == "dslr has 498 images where 498 were published (mug 7 of 8, pen 11 of 10)"
        (tmp_path / "webcam" / "images" / "mug").rename(tmp_path / "webcam" / "images" / "cup")
        shutil.rmtree(tmp_path / "dslr")
        for allowed, code in ((False, "benchmark-differs"), (True, "classes-differ")):
            with raises(code):
                find_benchmark(OFFICE31, tmp_path, [OFFICE31.task("A>W")], allow_incomplete=allowed)

    def test_the_counts_sum_to_the_published_ones(self) -> None:
        for domain in OFFICE31.domains:
            assert (sum(domain.per_class.values()), len(domain.per_class)) == (domain.images, OFFICE31.classes)
        assert sum(d.images for d in DOMAINNET.domains) == 586_575


class TestLists:
    """A list says more than folders: which images, and in which order the classes are numbered."""

    LISTED: tuple[tuple[str, int], ...] = (("pen/0.jpg", 0), ("mug/0.jpg", 1), ("pen/1.jpg", 0), ("mug/1.jpg", 1))

    def listed(self, prefix: str) -> str:
        return "".join(f"{prefix}{path} {label}\n" for path, label in self.LISTED)

    @pytest.mark.parametrize(
        ("file", "prefix"),
        [
            ("amazon.txt", "./amazon/"),  # the authors' and AFN's
            ("amazon_list.txt", "./amazon/"),
            ("amazon.txt", "amazon/"),
            ("amazon_list.txt", "/data/office/domain_adaptation_images/amazon/images/"),  # CDAN's
            ("amazon_list.txt", "/Checkpoint/somebody/data/office/amazon/images/"),  # SHOT's
            ("image_list/amazon.txt", "amazon/"),  # tllib's
            ("amazon/image_list.txt", ""),  # VisDA's
            ("amazon/train_image_list.txt", ""),
        ],
    )
    @pytest.mark.parametrize("inner", ["", "images"])
    def test_the_lists_that_are_about(self, tmp_path: Path, file: str, prefix: str, inner: str) -> None:
        folders(tmp_path)
        shutil.rmtree(tmp_path / "amazon")
        fill(tmp_path / "amazon" / inner)
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(self.listed(prefix))
        found = find(tmp_path).domains["amazon"]
        between = f"{inner}/" if inner else ""
        assert found.images.paths == tuple(f"amazon/{between}{path}" for path, _ in self.LISTED)
        assert found.images.labels == (0, 1, 0, 1)
        assert found.images.classes == ("pen", "mug")  # in the list's order, not in the alphabet's
        assert found.images.root == tmp_path
        assert (found.folder, found.layout) == (None, f"list {file}")

    def test_train_and_test_lists_together_are_the_whole_domain(self, tmp_path: Path) -> None:
        folders(tmp_path)
        lines = self.listed("amazon/").splitlines(keepends=True)
        (tmp_path / "amazon_train.txt").write_text("".join(lines[:3]))
        assert find(tmp_path).domains["amazon"].layout == "folder amazon"  # one of two lists says nothing
        (tmp_path / "amazon_test.txt").write_text(lines[3])
        found = find(tmp_path).domains["amazon"]
        assert found.layout == "lists amazon_train.txt and amazon_test.txt together"
        assert len(found.images) == 4
        (tmp_path / "amazon.txt").write_text("".join(lines))
        assert find(tmp_path).domains["amazon"].layout == "list amazon.txt"

    def test_files_that_are_missing(self, tmp_path: Path) -> None:
        folders(tmp_path)
        file = tmp_path / "amazon_list.txt"
        file.write_text(self.listed("/elsewhere/amazon/images/"))
        (tmp_path / "amazon" / "pen" / "0.jpg").unlink()
        with raises("listed-file-missing"):
            find(tmp_path, allow_incomplete=True)
        shutil.rmtree(tmp_path / "amazon")
        with raises("listed-file-missing"):
            find(tmp_path)


class TestVisda:
    BENCHMARK = replace(VISDA2017, domains=tuple(replace(d, images=24) for d in VISDA2017.domains))

    def test_its_classes_have_names(self, tmp_path: Path) -> None:
        for name in ("train", "validation"):
            fill(tmp_path / name, VISDA2017.class_names)
        assert find(tmp_path, self.BENCHMARK).domains["validation"].images.classes == VISDA2017.class_names
        (tmp_path / "train" / "bus").rename(tmp_path / "train" / "coach")
        with raises("benchmark-differs"):
            find(tmp_path, self.BENCHMARK)

    def test_the_class_train_is_not_the_domain(self, tmp_path: Path) -> None:
        fill(tmp_path / "train", VISDA2017.class_names)
        with raises("domain-missing"):
            find(tmp_path, self.BENCHMARK)


class TestBadFolders:
    def test_no_folder_no_domain_and_a_domain_that_is_missing(self, tmp_path: Path) -> None:
        with raises("benchmark-missing"):
            find(tmp_path / "gone")
        with raises("domain-missing"):
            find(tmp_path)
        shutil.rmtree(folders(tmp_path) / "dslr")
        with raises("domain-missing"):
            find(tmp_path, allow_incomplete=True)
        assert list(find_benchmark(SMALL, tmp_path, [SMALL.task("A>R")]).domains) == ["amazon", "Real_World"]

    @pytest.mark.parametrize("allow_incomplete", [False, True])
    def test_a_class_folder_renamed(self, tmp_path: Path, allow_incomplete: bool) -> None:
        (folders(tmp_path) / "dslr" / "mug").rename(tmp_path / "dslr" / "cup")
        with raises("classes-differ"):
            find(tmp_path, allow_incomplete=allow_incomplete)

    @pytest.mark.parametrize(
        ("change", "difference"),
        [
            (lambda data: (data / "dslr/mug/0.jpg").unlink(), "dslr has 3 images where 4 were published"),
            (lambda data: touch(data / "dslr/mug/9.jpg"), "dslr has 5 images where 4 were published"),
            (lambda data: touch(data / "dslr/x/0.jpg"), "dslr has 3 classes where 2 were published"),
        ],
    )
    def test_other_images_than_published(self, tmp_path: Path, change: Callable, difference: str) -> None:
        change(folders(tmp_path))
        if "images" in difference:
            assert find(tmp_path, allow_incomplete=True).differences == (difference,)
        with raises("benchmark-differs"):
            find(tmp_path)
