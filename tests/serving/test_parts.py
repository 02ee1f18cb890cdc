"""Predictions in parts: resumed after a kill without repeating work, from files and tars."""

import csv
import os
import shutil
import signal
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest

import cdtrans
from cdtrans.record.files import Lock, try_lock
from cdtrans.runtime.screen import Screen
from cdtrans.serving import parts, predict as module
from cdtrans.serving.classifier import Classifier, load
from cdtrans.serving.parts import PartFolder, folder_of
from cdtrans.serving.predict import Predicted, PredictionJob
from commands import Ended, warm
from support import add_member, error_says, make_tar, raises, says
from tiny_task import draw

PART = 8
CONSTANTS = {"cdtrans.serving.parts.PART": PART}
IMAGES = 30  # in four parts


@pytest.fixture(scope="module")
def classifier(finished) -> Classifier:
    return load(finished.run, device="cpu")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The images, and one that is empty, in the second part."""
    folder = tmp_path_factory.mktemp("drawn")
    for n in range(IMAGES - 1):
        draw(folder / f"{n:02}.png", n % 3, seed=n)
    (folder / "09a.png").write_bytes(b"")
    return folder


@pytest.fixture
def images(drawn: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return shutil.copytree(drawn, tmp_path / "images")


class Watched:
    """Predicts with one classifier, counts the images that it is given, and hears what is said."""

    def __init__(self, run: Path, classifier: Classifier, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run, self.classifier, self.given, self.heard = run, classifier, 0, []
        stream = classifier.stream_batches

        def counted(batches, **how):
            return stream((self.count(batch) for batch in batches), **how)

        monkeypatch.setattr(classifier, "stream_batches", counted)
        monkeypatch.setattr(module, "load", lambda *_, **__: self.classifier)
        self.screen = Screen(quiet=True)
        self.screen.warn = self.screen.result = self.heard.append

    def count(self, batch: Sequence) -> Sequence:
        self.given += len(batch)
        return batch

    def __call__(self, images: Path, file: Path | None, kind: str = "csv", **options) -> Predicted:
        self.given = 0
        self.heard.clear()
        return cdtrans.predict(self.run, images, **{kind: file}, screen=self.screen, **options)


@pytest.fixture
def watched(finished, classifier: Classifier, monkeypatch: pytest.MonkeyPatch) -> Watched:
    monkeypatch.setattr(parts, "PART", PART)
    return Watched(finished.run, classifier, monkeypatch)


def rows(file: Path) -> list[dict[str, str]]:
    with open(file, newline="", encoding="utf-8", errors="surrogateescape") as text:
        return list(csv.DictReader(text))


def times(file: Path) -> dict[str, int]:
    return {part.name: part.stat().st_mtime_ns for part in folder_of(file).glob("*.part")}


def predict(finished, images: Path, file: Path, *flags: str, **how) -> Ended:
    command = ["predict", finished.run, images, "--csv", file, "--max-bad", "0.1", *flags]
    return warm().run(list(map(str, command)), file.parent / "logs", constants=CONSTANTS, **how)


def uninterrupted(classifier: Classifier, images: Path, file: Path) -> bytes:
    """The file of one process that is never stopped. Its parts are as large: with some processors the last digit of a
    probability depends on how many images are predicted at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "PART", PART)
        PredictionJob(classifier, images, None, "csv", 1, 0.0, 0.1, Screen(quiet=True)).run(file)
    return file.read_bytes()


class TestKilled:
    def test_finished_parts_are_not_done_again(self, finished, images: Path, classifier, tmp_path: Path) -> None:
        expected = uninterrupted(classifier, images, tmp_path / "whole.csv")
        file = tmp_path / "p.csv"
        file.write_text("older")
        assert predict(finished, images, file, crash={"name": "00002.part", "when": "before"}).code == -9
        first = times(file)
        assert sorted(first) == ["00000.part", "00001.part"]
        killed = predict(finished, images, file, crash={"name": "p.csv", "when": "before"})  # while it is joined
        second = times(file)
        assert (killed.code, len(second)) == (-9, 4)
        assert first.items() <= second.items()
        assert file.read_text() == "older"
        assert predict(finished, images, file, crash={"name": "p.csv", "when": "after"}).code == -9
        assert times(file) == second
        ended = predict(finished, images, file)
        assert ended.code == 0, ended.err
        assert says(ended.out, "Resuming", "p.csv.parts", f"{IMAGES - 1} images")
        assert says(ended.err, f"1 of {IMAGES} files", "09a.png", "p.csv.skipped.csv"), "of a part that was done before"
        assert file.read_bytes() == expected
        skipped = (tmp_path / "p.csv.skipped.csv").read_text()
        assert skipped == f"path,cause\r\n{images / '09a.png'},empty file\r\n".replace("\r\n", "\n")
        assert not folder_of(file).exists()

    def test_ctrl_c_keeps_finished_parts(self, finished, images: Path, classifier, tmp_path: Path) -> None:
        (tmp_path / "list.txt").write_text("".join(f"{n % 9:02}.png\n" for n in range(2000)))
        file = tmp_path / "p.csv"
        command = ["predict", finished.run, tmp_path / "list.txt", "--root", images, "--csv", file]
        command = list(map(str, command))
        process = warm().start(command, tmp_path / "logs", constants=CONSTANTS)
        assert process.wait_until(lambda: len(times(file)) > 1)
        process.send(signal.SIGINT)
        ended = process.wait()
        assert ended.code == 130
        assert says(ended.err, "error: interrupted", "same command again to resume")
        assert ended.err.count("\n") == 1
        assert times(file)
        assert not file.exists()
        assert warm().run(command, tmp_path / "logs", constants=CONSTANTS).code == 0
        assert [Path(row["path"]).stem for row in rows(file)] == [f"{n % 9:02}" for n in range(2000)]

    def test_tars_are_resumed(self, watched: Watched, images: Path, tmp_path: Path) -> None:
        """A part may hold images of several tars."""
        files = sorted(images.iterdir())
        for name, some in (("a", files[:12]), ("b", files[12:])):
            with_all(tmp_path / "t" / f"{name}.tar", some)
        file = tmp_path / "p.csv"
        with raises("too-many-unreadable"):
            watched(tmp_path / "t", file, max_bad=0.0)
        assert (watched.given, len(times(file))) == (30, 4)
        (folder_of(file) / "00001.part").unlink()
        os.utime(tmp_path / "t" / "b.tar", (1, 1))
        assert watched(tmp_path / "t", file, max_bad=0.1).images == 29
        assert watched.given == IMAGES - PART, "all but the part that has no image of the second tar"
        names = [Path(row["path"]).name for row in rows(file)]
        assert names == [f.name for f in files if f.stat().st_size]


class TestWhatHasChanged:
    """After a command that ended with too many unreadable files, which keeps its parts."""

    @pytest.fixture
    def file(self, watched: Watched, images: Path, tmp_path: Path) -> Path:
        with raises("too-many-unreadable"):
            watched(images, tmp_path / "p.csv", max_bad=0.0)
        assert len(times(tmp_path / "p.csv")) == 4
        return tmp_path / "p.csv"

    @pytest.mark.parametrize(
        ("kept", "added", "given"), [(30, 0, 0), (30, 5, 35 - 3 * PART), (20, 0, 4), (16, 0, 0), (8, 0, 0)]
    )
    def test_more_or_fewer_images(
        self, watched: Watched, images: Path, file: Path, kept: int, added: int, given: int
    ) -> None:
        """Only the parts that they change are predicted again: the last, and what follows it."""
        for path in sorted(images.iterdir())[kept:]:
            path.unlink()
        for n in range(added):
            draw(images / f"x{n}.png", 0, seed=n)
        readable = kept + added - (kept > 9)
        assert watched(images, file, max_bad=0.2).images == readable
        assert watched.given == given
        assert len(rows(file)) == readable
        assert not folder_of(file).exists()

    def test_an_image(self, watched: Watched, images: Path, file: Path) -> None:
        draw(images / "09a.png", 0, seed=5)
        result = watched(images, file, max_bad=0.0)
        assert (result.images, result.skipped, watched.given) == (30, 0, PART)
        assert not (file.parent / "p.csv.skipped.csv").exists(), "the list of before must not remain"
        assert file.read_bytes() == uninterrupted(watched.classifier, images, file.with_name("whole.csv"))

    def test_the_settings(self, watched: Watched, images: Path, file: Path, finished) -> None:
        before = times(file)
        for options in ({"top": 2}, {"abstain": 0.5}):
            with raises("parts-of-another-command"):
                watched(images, file, **options)
        watched.classifier = load(finished.run, model="source", device="cpu")
        with raises("parts-of-another-command"):
            watched(images, file)
        assert (watched.given, times(file)) == (0, before)

    def test_a_bit_is_flipped_or_a_name_is_foreign(self, watched: Watched, images: Path, file: Path) -> None:
        """In the rows of one part, and in the counts of another."""
        stored = sorted(folder_of(file).glob("*.part"))
        for part, place in ((stored[2], -9), (stored[3], stored[3].read_bytes().index(b'"images": ') + 10)):
            content = bytearray(part.read_bytes())
            content[place] ^= 1
            part.write_bytes(content)
        (folder_of(file) / "zz-y.part").write_bytes(b"not ours")
        assert watched(images, file).images == 29
        assert watched.given == IMAGES - 2 * PART
        assert file.read_bytes() == uninterrupted(watched.classifier, images, file.with_name("whole.csv"))
        assert [left.name for left in folder_of(file).iterdir()] == ["zz-y.part"]

    def test_a_part_is_damaged_before_it_is_joined(self, watched: Watched, images: Path, file: Path) -> None:
        first = folder_of(file) / "00000.part"
        draw(images / "28.png", 0, seed=9)
        watched.count = lambda batch: first.write_bytes(b"") or batch
        with raises("part-damaged"):
            watched(images, file)

    def test_a_tar_while_it_is_predicted(self, watched: Watched, images: Path, tmp_path: Path, monkeypatch) -> None:
        tar, file, count = with_all(tmp_path / "a.tar", sorted(images.iterdir())), tmp_path / "p.csv", watched.count

        def touched(batch: Sequence) -> Sequence:
            os.utime(tar, (1, watched.given))
            return count(batch)

        with monkeypatch.context() as patch:
            patch.setattr(watched, "count", touched)
            with raises("images-changed"):
                watched(tar, file)
        assert not file.exists()
        assert watched(tar, file).images == 29
        assert not folder_of(file).exists()


def test_two_commands_at_once(watched: Watched, images: Path, tmp_path: Path) -> None:
    with PartFolder(tmp_path / "p.csv", {}).locked(), raises("parts-locked"):
        watched(images, tmp_path / "p.csv")
    assert not folder_of(tmp_path / "p.csv").exists()
    assert watched(images, tmp_path / "p.csv").images == 29


@pytest.mark.skipif(os.name == "nt", reason="Windows cannot delete an open file")
def test_the_lock_s_file_is_deleted_before_another_command_can_take_it(tmp_path: Path, monkeypatch) -> None:
    folder, left = PartFolder(tmp_path / "p.csv", {}), []
    file = folder.folder / ".lock"

    def watched_lock(where: Path) -> Lock:
        lock = try_lock(where)
        assert lock
        lock.callback(lambda: left.append(file.exists()))  # before it is released
        return lock

    monkeypatch.setattr(parts, "try_lock", watched_lock)
    with folder.locked():
        assert file.exists()
    assert left == [False]
    assert not folder.folder.exists()


def test_what_fits_into_one_part_needs_no_folder(watched: Watched, images: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(parts, "PART", IMAGES)
    monkeypatch.setattr(parts, "try_lock", None)
    assert watched(images, tmp_path / "p.csv").images == 29


def with_all(tar: Path, files: Sequence[Path]) -> Path:
    """A tar of these images, with a label beside each as webdataset has it."""
    make_tar(tar)
    with tarfile.open(tar, "w") as archive:
        for file in files:
            add_member(archive, file.name, file.read_bytes())
            add_member(archive, f"{file.stem}.cls", b"1")
    return tar


class TestTars:
    def test_the_predictions_of_the_files(self, watched: Watched, images: Path, tmp_path: Path) -> None:
        tar = with_all(tmp_path / "s.tar", sorted(images.iterdir()))
        watched(images, tmp_path / "files.csv")
        watched(tar, tmp_path / "tar.csv")
        expected = [row | {"path": f"{tar}/{Path(row['path']).name}"} for row in rows(tmp_path / "files.csv")]
        assert rows(tmp_path / "tar.csv") == expected
        assert rows(tmp_path / "tar.csv.skipped.csv") == [{"path": f"{tar}/09a.png", "cause": "empty file"}]
        predictions = watched.classifier.stream(tar)
        assert [str(p.path) for p in predictions][-1] == f"{tar}/28.png"

    def test_damage_counts_as_unreadable(self, watched: Watched, images: Path, tmp_path: Path) -> None:
        good = [file for file in sorted(images.iterdir()) if file.stat().st_size]
        with_all(tmp_path / "t" / "a.tar", good[:10])
        cut = with_all(tmp_path / "t" / "b.tar", good[10:])
        os.truncate(cut, cut.stat().st_size // 2)
        with raises("too-many-damaged-tars"):
            watched(tmp_path / "t", tmp_path / "p.csv", max_bad=0.1)  # although it is one file of many
        assert any(says(text, "b.tar'", "damaged or truncated") for text in watched.heard)
        assert not (tmp_path / "p.csv").exists()
        with raises("too-many-damaged-tars"):
            watched(tmp_path / "t", None, max_bad=0.1)
        result = watched(tmp_path / "t", tmp_path / "p.csv", max_bad=0.5)
        assert 12 < result.images < 29
        assert rows(tmp_path / "p.csv.skipped.csv")[0]["path"] == str(cut)

    def test_what_lies_beside_tars_is_not_lost_silently(self, watched: Watched, images: Path, tmp_path: Path) -> None:
        folder = tmp_path / "tars"
        with_all(folder / "a.tar", sorted(images.glob("0?.png")))
        (folder / "b.tar").symlink_to("nowhere")
        (folder / "x.heic").write_bytes(b"x")
        assert watched(folder, tmp_path / "p.csv", max_bad=0.5).skipped == 1
        assert any("b.tar" in text for text in watched.heard)
        assert any("x.heic" in text for text in watched.heard)

    @pytest.mark.parametrize("content", [b"", b"no tar\n" * 200, b"\x1f\x8b\x08 compressed"])
    def test_no_tar_is_refused_before_anything_is_written(self, watched, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "s.tar").write_bytes(content)
        with raises("tar-damaged"):
            watched(tmp_path / "s.tar", tmp_path / "p.csv")
        make_tar(tmp_path / "s.tar", "notes.txt")
        with raises("no-image"):
            watched(tmp_path / "s.tar", tmp_path / "p.csv")
        assert [file.name for file in tmp_path.iterdir()] == ["s.tar"]


class TestSkipped:
    def test_the_first_are_named_and_all_are_listed(self, watched: Watched, images: Path, tmp_path: Path) -> None:
        for n in range(25):
            (images / f"y{n:02}.png").write_bytes(b"")
        with raises("too-many-unreadable"):
            watched(images, tmp_path / "p.csv")
        assert len([text for text in watched.heard if text.startswith("skipped")]) == 10
        assert len(rows(tmp_path / "p.csv.skipped.csv")) == 26
        assert watched(images, tmp_path / "p.csv", max_bad=0.5).skipped == 26
        assert watched.given == 0

    def test_the_list_replaces_no_input(self, watched: Watched, images: Path, tmp_path: Path) -> None:
        (tmp_path / "p.csv.skipped.csv").write_text("images/00.png\n")
        with error_says("p.csv.skipped.csv'", "input", "--csv"):
            watched(tmp_path / "p.csv.skipped.csv", tmp_path / "p.csv")
        (tmp_path / "q.csv.parts").write_text("")
        with raises("no-folder-for-parts"):
            watched(images, tmp_path / "q.csv")


class TestParquet:
    def test_it_has_the_columns_of_the_csv_with_types(self, watched: Watched, images: Path, tmp_path: Path, finished):
        pytest.importorskip("pyarrow", reason="pip install '.[parquet]'")
        from pyarrow import parquet

        (images / "00.png").rename(os.fsdecode(os.fsencode(images) + b"/0\xff.png"))
        watched.classifier.no_class = load(finished.run, device="cpu", unknown=True).no_class
        try:
            sure = sorted(p.probability for p in watched.classifier.predict(sorted(images.glob("1*.png"))))[5]
            how = {"top": 2, "abstain": sure}
            watched(images, tmp_path / "p.csv", **how)
            result = watched(images, tmp_path / "p.parquet", "parquet", **how)
        finally:
            watched.classifier.no_class = None
        assert (result.csv, result.parquet) == (None, tmp_path / "p.parquet")
        file = parquet.ParquetFile(tmp_path / "p.parquet")
        assert [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)] == [8, 7, 8, 6]
        types = {field.name: str(field.type) for field in file.schema_arrow}
        numbers = {"probability", "no_class", "probability_1", "probability_2"}
        assert types == {name: "float" if name in numbers else "string" for name in types}
        table = file.read().to_pylist()
        assert None in [row["label"] for row in table]
        for ours, theirs in zip(table, rows(tmp_path / "p.csv"), strict=True):
            assert list(ours) == list(theirs)
            for name, value in theirs.items():
                if types[name] == "float":
                    assert ours[name] == pytest.approx(float(value), abs=1e-6)
                elif name == "path":
                    assert ours[name] == value.replace("\udcff", r"\xff")
                else:
                    assert (ours[name] or "") == value

    def test_without_pyarrow(self, finished, images: Path, tmp_path: Path) -> None:
        command = ["predict", finished.run, images, "--parquet", tmp_path / "p.parquet"]
        ended = warm().run(list(map(str, command)), tmp_path / "logs", without=["pyarrow"])
        assert ended.code == 2
        assert says(ended.err, "p.parquet' needs pyarrow", "pip install cdtrans[parquet]")
        assert not (tmp_path / "p.parquet").exists()
        with raises("two-tables"):
            cdtrans.predict(finished.run, images, csv=tmp_path / "p.csv", parquet=tmp_path / "p.parquet")
