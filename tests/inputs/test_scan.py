"""Folders and lists of images become the right domains, and every bad one a single clear sentence."""

import dataclasses
import inspect
import os
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import assume, given, strategies as st
from PIL import Image

from cdtrans.inputs.images import decode
from cdtrans.inputs.scan import (
    LabelledDomain,
    UnlabelledDomain,
    check_distinct,
    require_outside,
    scan_labelled,
    scan_unlabelled,
    stream_images,
    warnings_for,
)
from support import raises, says

SCANS = pytest.mark.parametrize("scan", [scan_labelled, scan_unlabelled])


def image(path: Path) -> Path:
    """A real one-pixel image at this path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    formats = {".jpg": "JPEG", ".tif": "TIFF"}
    Image.new("RGB", (1, 1)).save(path, formats.get(path.suffix.lower(), path.suffix[1:]))
    return path


def folder(top: Path, *names: str) -> Path:
    for name in names:
        image(top / name)
    return top


def text(path: Path, *lines: str) -> Path:
    path.write_bytes("\n".join(lines).encode("utf-8", "surrogateescape"))
    return path


def link(place: Path, to: Path) -> Path:
    place.symlink_to(to)
    return place


def pipe(place: Path) -> Path:
    os.mkfifo(place)
    return place


# The types


def test_the_fingerprint_sees_names_sizes_labels_and_order(tmp_path: Path) -> None:
    def fingerprint(paths: str, labels: tuple[int, ...] = (0, 1)) -> str:
        return LabelledDomain(tmp_path, tuple(paths), labels, ("x", "y")).fingerprint()

    for name, content in (("a", b"1"), ("b", b"2"), ("c", b"33")):
        (tmp_path / name).write_bytes(content)
    base = fingerprint("ab")
    assert base == fingerprint("ab")
    others = [fingerprint("a", (0,)), fingerprint("ac"), fingerprint("ba"), fingerprint("ab", (1, 0))]
    others.append(UnlabelledDomain(tmp_path, ("a", "b")).fingerprint())
    (tmp_path / "b").write_bytes(b"22")
    others.append(fingerprint("ab"))
    assert len({base, *others}) == len(others) + 1


def test_length_files_counts_and_keep():
    domain = LabelledDomain(Path("r"), ("a/1.png", "a/2.png", "b/1.png"), (0, 0, 1), ("a", "b"))
    assert (len(domain), domain.counts()) == (3, {"a": 2, "b": 1})
    assert domain.files() == [Path("r/a/1.png"), Path("r/a/2.png"), Path("r/b/1.png")]
    kept = domain.keep([1, 0])
    assert kept == LabelledDomain(Path("r"), ("a/2.png", "a/1.png"), (0, 0), ("a", "b"))
    assert kept.counts() == {"a": 2, "b": 0}
    target = UnlabelledDomain(Path("r"), ("1.png", "2.png"))
    assert target.keep([1]) == UnlabelledDomain(Path("r"), ("2.png",))
    assert (len(target), target.files()) == (2, [Path("r/1.png"), Path("r/2.png")])
    with pytest.raises(dataclasses.FrozenInstanceError):
        target.paths = ()


# Folders


def test_labelled_folder(tmp_path):
    top = folder(tmp_path / "s", "dog/2.jpg", "dog/1.PNG", "cat/deep/er/1.gif", "cat/0.Tif", "bird/1.webp", "cat/9.bmp")
    (top / "empty").mkdir()
    (top / "notes").mkdir()
    (top / "notes" / "readme.txt").write_text("no image")
    domain = scan_labelled(top)
    assert domain.root == top
    assert domain.classes == ("bird", "cat", "dog")
    assert domain.paths == ("bird/1.webp", "cat/0.Tif", "cat/9.bmp", "cat/deep/er/1.gif", "dog/1.PNG", "dog/2.jpg")
    assert domain.labels == (0, 1, 1, 1, 2, 2)
    assert all(decode(file).size == (1, 1) for file in domain.files())


def test_order_does_not_depend_on_the_file_system(tmp_path, monkeypatch):
    """Classes that are prefixes of each other too: 'a b' sorts before 'a/' as text, but after 'a' as a class."""
    top = folder(tmp_path / "s", "a/1.png", "a b/1.png", "a-b/1.png", "B/2.png", "B/10.png")
    plain = scan_labelled(top)
    assert plain.classes == ("B", "a", "a b", "a-b")
    assert plain.paths == ("B/10.png", "B/2.png", "a/1.png", "a b/1.png", "a-b/1.png")
    scandir = os.scandir

    @contextmanager
    def backwards(where):
        with scandir(where) as entries:
            yield sorted(entries, key=lambda entry: entry.name, reverse=True)

    monkeypatch.setattr(os, "scandir", backwards)
    assert scan_labelled(top) == plain


def test_hidden_entries_and_archive_leftovers_are_ignored(tmp_path):
    top = folder(tmp_path / "s", "a/1.png", "a/._1.png", "b/1.png", ".git/x.png", "b/.cache/1.png", "__MACOSX/a/1.png")
    assert scan_labelled(top).paths == ("a/1.png", "b/1.png")
    hidden_top = folder(tmp_path / ".hidden", "1.png")
    assert len(scan_unlabelled(hidden_top)) == 1


@pytest.mark.parametrize("name", ["my cat (1).png", "-rf.png", "été 猫 🐈.png", "a\nb.png", "#1.png", "a'\"\\.png"])
def test_odd_names(tmp_path, name):
    top = folder(tmp_path / "s", f"cls/{name}", f"🐕 dog/{name}")
    domain = scan_labelled(top)
    assert domain.paths == (f"cls/{name}", f"🐕 dog/{name}")
    assert domain.classes == ("cls", "🐕 dog")
    assert [decode(file).size for file in domain.files()] == [(1, 1)] * 2


def test_files_that_may_be_images_are_named_and_what_cannot_be_is_not(tmp_path):
    top = folder(tmp_path / "s", "a/1.png", "b/1.png")
    expected = ("a/2.HEIC", "b/deep/x.avif", "b/scan", "c.dat")
    harmless = ("a/Thumbs.db", "a/.DS_Store", "README", "b/LICENSE", "a/notes.TXT", "c.csv", "b/1.json", "a/1.xmp")
    for name in (*expected, *harmless):
        (top / name).parent.mkdir(exist_ok=True)
        (top / name).touch()
    pipe(top / "b" / "pipe")
    link(top / "b" / "gone", top / "nowhere")
    source, target = scan_labelled(top), scan_unlabelled(top)
    assert source.paths == target.paths == ("a/1.png", "b/1.png")
    assert source.ignored == target.ignored == source.keep([0]).ignored == target.keep([0]).ignored == expected
    assert list(stream_images(top)) == source.files()


# Links


def test_links_inside_are_other_names_and_do_not_multiply(tmp_path):
    """Followed, seven folders with a link to each other one would be thousands of paths."""
    top = folder(tmp_path / "t", *(f"{n}/1.png" for n in range(7)))
    for n in range(7):
        for other in range(7):
            (top / str(n) / f"to{other}").symlink_to(top / str(other))
    assert scan_unlabelled(top).paths == tuple(f"{n}/1.png" for n in range(7))
    assert len(scan_labelled(top).classes) == 7


def test_links_to_the_outside_are_followed_and_a_folder_there_is_entered_once(tmp_path):
    outside = folder(tmp_path / "outside", "1.png", "deep/2.png")
    link(outside / "back", outside)
    top = folder(tmp_path / "t", "a/1.png")
    for name in ("b", "c", "a/d"):
        link(top / name, outside)
    link(top / "a" / "2.png", outside / "1.png")
    assert scan_unlabelled(link(tmp_path / "top", top)).paths == scan_unlabelled(top).paths
    assert scan_unlabelled(top).paths == ("a/1.png", "a/2.png", "a/d/1.png", "a/d/deep/2.png")


def test_broken_links_and_pipes_named_like_images_are_kept_to_be_reported(tmp_path):
    top = folder(tmp_path / "t", "1.png")
    link(top / "2.png", tmp_path / "gone.png")
    link(top / "3.png", top / "3.png")
    link(top / "4.png", pipe(top / "5.png"))
    link(top / "6.txt", tmp_path / "gone.txt")
    link(top / "self", top / "self")  # leads nowhere, and nobody expects it to be read
    link(top / "one", top / "two")
    link(top / "two", top / "one")
    assert scan_unlabelled(top).paths == ("1.png", "2.png", "3.png", "4.png", "5.png")


def test_very_deep_nesting(tmp_path):
    """Deeper than Python recurses, here 150 calls from now; for the same reason folders are made and removed one by
    one."""
    folders = [tmp_path]
    for _ in range(250):
        folders.append(folders[-1] / "d")
        folders[-1].mkdir()
    deepest = image(folders[-1] / "1.png")
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 150)
    try:
        images = len(scan_unlabelled(tmp_path))
    finally:
        sys.setrecursionlimit(limit)
    deepest.unlink()
    for folder in reversed(folders[1:]):
        folder.rmdir()
    assert images == 1


# Lists


@pytest.mark.parametrize(
    ("lines", "classes", "labels"),
    [
        # The authors' format: classes are named after the folders, and DomainNet's gap in the ids is no empty class.
        (("dog/1.png 10", "cat/1.png 2", "ant/1.png 7", "cat/2.png 2"), ("cat", "ant", "dog"), (2, 0, 1, 0)),
        (("a/1.png 10", "b/1.png 10", "c/1.png 9"), ("9", "10"), (1, 1, 0)),  # two folders in one class
        (("a/1.png 10", "x/a/1.png 9"), ("9", "10"), (1, 0)),  # two classes with one folder name
        (("1.png 10", "a/1.png 9"), ("9", "10"), (1, 0)),  # no folder
        (("3.png zebra", "1.png 10", "2.png ant"), ("10", "ant", "zebra"), (2, 0, 1)),
        (("1.png 7", f"2.png {'9' * 5000}"), ("7", "9" * 5000), (0, 1)),  # so many digits are a name
    ],
)
def test_labels_of_a_list_become_classes(tmp_path, lines, classes, labels):
    paths = tuple(line.split()[0] for line in lines)
    domain = scan_labelled(text(folder(tmp_path, *paths) / "list.txt", *lines))
    assert domain == LabelledDomain(tmp_path, paths, labels, classes)


def test_comments_blank_lines_windows_ends_byte_order_mark_and_tabs(tmp_path):
    folder(tmp_path, "a b.png", "2.png")
    where = text(tmp_path / "list.txt", "\ufeff# comment", "", "  ", "a b.png\t 0 \r", "2.png 1\r", "#2.png 5", "")
    assert scan_labelled(where).paths == ("a b.png", "2.png")
    assert scan_unlabelled(where).paths == ("a b.png", "2.png")


def test_behind_a_tab_a_label_may_hold_spaces(tmp_path):
    """As may the path before it; a tab within a path is still a part of it."""
    names = ("my seal.png", "2.png", "a\tb.png", "3.png", "4.png")
    folder(tmp_path, *names)
    lines = (
        "my seal.png\tsea lion",
        "2.png \t  great white shark \r",
        "a\tb.png seal",
        "3.png\tseal",
        "4.png\tseal\t1",
    )
    where = text(tmp_path / "list.txt", *lines)
    domain = scan_labelled(where)
    assert domain.paths == scan_unlabelled(where).paths == names
    labels = ["sea lion", "great white shark", "seal", "seal", "seal\t1"]
    assert [domain.classes[label] for label in domain.labels] == labels


def test_root_of_a_list(tmp_path):
    root = folder(tmp_path / "images", "a/1.png", "b/1.png")
    where = text(tmp_path / "list.txt", "a/1.png 0", f"{root}/b/1.png 1")
    domain = scan_labelled(where, root)
    assert domain.root == root
    assert domain.files() == [root / "a/1.png", root / "b/1.png"]
    assert scan_unlabelled(where, root).files() == domain.files()
    with raises("listed-file-missing"):
        scan_labelled(where)
    with raises("root-missing"):
        scan_labelled(where, tmp_path / "nowhere")


def test_labels_of_a_target_list_are_dropped(tmp_path):
    folder(tmp_path, "a.png", "my cat.png", "b/c.jpg")
    names = ["a.png", "my cat.png", "b/c.jpg"]
    bare = scan_unlabelled(text(tmp_path / "bare.txt", *names))
    assert bare.paths == tuple(names)
    for labels in (["0", "1", "2"], ["2", "1", "0"], ["cat", "0", "my"]):
        lines = [f"{name} {label}" for name, label in zip(names, labels, strict=True)]
        assert scan_unlabelled(text(tmp_path / "labelled.txt", *lines)) == bare
    assert scan_unlabelled(text(tmp_path / "mixed.txt", "a.png 3", "my cat.png", "b/c.jpg x")) == bare


def test_a_target_line_that_is_a_file_is_not_cut(tmp_path):
    """'my cat.png' is an image even where a file 'my' lies beside it; 'my' with the label 'dog.png' is 'my'."""
    folder(tmp_path, "my cat.png", "a 1.png")
    for name in ("my", "raw 7"):
        (tmp_path / name).write_bytes((tmp_path / "a 1.png").read_bytes())
    where = text(tmp_path / "list.txt", "my cat.png", "my dog.png", "raw 7", "a 1.png 1.5")
    assert scan_unlabelled(where).paths == ("my cat.png", "my", "raw 7", "a 1.png")


NAMES = st.binary(min_size=1, max_size=40).filter(lambda name: not set(name) & set(b"/\0\n"))


@given(
    names=st.lists(NAMES, min_size=2, max_size=6, unique=True),
    labels=st.lists(st.integers(-5, 5), min_size=6, max_size=6),
    gap=st.sampled_from([" ", "\t", "  "]),
    end=st.sampled_from(["\n", "\r\n"]),
)
def test_lists_round_trip(tmp_path_factory, names, labels, gap, end):
    """Whatever a file is called (save for a newline), a list can name it, with and without a label."""
    labels = labels[: len(names)]
    assume(len(set(labels)) > 1)
    paths = [f"images/{os.fsdecode(name)}.png" for name in names]
    top = Path(tempfile.mkdtemp(dir=tmp_path_factory.getbasetemp()))
    (top / "images").mkdir()
    try:
        for path in paths:
            (top / path).touch()
    except OSError:
        assume(False)
    where = top / "list.txt"
    lines = [f"{path}{gap}{label}" for path, label in zip(paths, labels, strict=True)]
    where.write_bytes(os.fsencode(end.join(lines)))
    domain = scan_labelled(where)
    assert domain.paths == tuple(paths)
    assert [int(domain.classes[label]) for label in domain.labels] == labels
    target = scan_unlabelled(where)
    assert target.paths == tuple(paths)
    where.write_bytes(os.fsencode(end.join(paths)))
    assert scan_unlabelled(where) == target


# Bad input


@pytest.mark.parametrize(
    ("code", "place"),
    [
        ("path-missing", lambda top: top / "nowhere"),
        ("path-missing", lambda top: image(top / "1.png") / "below"),
        ("path-missing", lambda top: link(top / "odd\n", top / "gone")),
        ("path-unreadable", lambda top: link(top / "loop", top / "loop")),
        ("no-folder-or-list", lambda top: pipe(top / "pipe")),
        ("no-folder-or-list", lambda top: image(top / "1.png")),
        ("no-image", lambda top: text(top / "class" / "a.txt").parents[1]),
        ("no-image", lambda top: text(top / "class" / "b.heic").parents[1]),
        ("list-empty", lambda top: text(top / "list.txt", "")),
        ("list-empty", lambda top: text(top / "list.txt", "# only a comment", "   ", "\t\r")),
        ("list-not-text", lambda top: image(top / "1.png").rename(top / "list.txt")),
        ("list-not-text", lambda top: text(top / "wide.txt", "a\0.\0p\0n\0g\0")),
        ("listed-file-missing", lambda top: text(top / "list.txt", "gone.png 1", "a.png/b.png 1")),
    ],
)
@SCANS
def test_a_bad_place_is_refused(tmp_path, scan, code, place):
    (tmp_path / "class").mkdir()
    with raises(code):
        scan(place(tmp_path))


@pytest.mark.parametrize(
    ("code", "advice", "place"),
    [
        ("no-class-folders", "CLASS/1.png'", lambda top: folder(top / "s", "1.png", "2.png")),
        ("one-class", "give a folder", lambda top: folder(top / "s", "dog/1.png", "dog/2.png", "1.png")),
        ("one-class", "/s/images'", lambda top: folder(top / "s", "images/mug/1.png", "images/pen/2.png")),
        ("one-class", "or a list", lambda top: text(top / "list.txt", "a.png 3", "my cat.png 3")),
        ("listed-file-missing", "put a tab", lambda top: text(top / "list.txt", "b.png 0", "my cat.png white shark")),
        ("listed-file-missing", ": correct", lambda top: text(top / "list.txt", "b.png 0", "your seal.png 0")),
        *(
            ("line-without-label", advice, lambda top, line=line: text(top / "list.txt", "a.png 0", "", line))
            for advice, lines in (
                ("write it as 'path label'.", ("b.png", " b.png", "my cat.png")),
                ("not a comma", ("path,label", "a.png,seal", "a.png;seal")),
            )
            for line in lines
        ),
    ],
)
def test_a_source_without_classes_or_files_is_refused(tmp_path, code, advice, place):
    folder(tmp_path, "a.png", "b.png", "my cat.png")
    with raises(code) as caught:
        scan_labelled(place(tmp_path))
    assert advice in str(caught.value)


def test_a_single_class_may_be_evaluated(tmp_path):
    assert scan_labelled(folder(tmp_path / "s", "mug/1.png", "mug/2.png"), allow_one_class=True).labels == (0, 0)


@SCANS
def test_no_permission(tmp_path, monkeypatch, scan):
    top, where = folder(tmp_path / "s", "a/1.png", "b/1.png"), text(tmp_path / "list.txt", "s/a/1.png 0", "s/b/1.png 1")

    def refused(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "scandir", refused)
    monkeypatch.setattr(Path, "open", refused)
    for place in (top, where):
        with raises("path-unreadable"):
            scan(place)


def test_source_and_target_must_differ(tmp_path):
    top = folder(tmp_path / "s", "a/1.png", "b/1.png")
    for target in (top, link(tmp_path / "link", top), top / "a" / ".."):
        with raises("same-domain"):
            check_distinct(top, target)
    for inner in (top / "a", link(tmp_path / "inner", top / "a")):
        for places in ((top, inner), (inner, top)):
            with raises("domains-overlap"):
                check_distinct(*places)
    check_distinct(top, tmp_path / "nowhere")
    check_distinct(top, tmp_path / ("long" * 100))  # an error of its own, when it is read
    check_distinct(top, folder(tmp_path / "s2", "1.png"))  # a longer name is not a place inside
    check_distinct(text(tmp_path / "s.txt", "s/a/1.png 0"), text(tmp_path / "t.txt", "s2/1.png"))


def test_a_run_folder_may_not_lie_in_the_images(tmp_path):
    top = folder(tmp_path / "s", "a/1.png")
    link(tmp_path / "link", top)
    for out in (top, top / "runs" / "new", tmp_path / "link" / "new", tmp_path / "x" / ".." / "s" / "a"):
        for places in ((tmp_path, top), (tmp_path / "link",)):
            with raises("run-inside-images"):
                require_outside(out, *places)
    require_outside(tmp_path / "s2", top, text(tmp_path / "s.txt", "s/a/1.png"))
    require_outside(tmp_path / "runs", top)


# One image after the other


def test_images_of_a_list_are_streamed_and_not_gathered(tmp_path):
    """A line that is wrong is met when it is reached."""
    folder(tmp_path, "a.png", "b c.png")
    images = stream_images(text(tmp_path / "list.txt", "a.png", "b c.png 3", "shard.tar", "a.png"))
    assert [next(images), next(images)] == [tmp_path / "a.png", tmp_path / "b c.png"]
    with raises("list-mixed"):
        next(images)


def test_missing_files_of_a_list_are_streamed_unless_all_are_missing(tmp_path):
    folder(tmp_path, "a.png")
    images = stream_images(text(tmp_path / "list.txt", "x.png 1", "y z.png", "a.png", "gone.png 3"))
    assert [path.name for path in images] == ["x.png", "y z.png", "a.png", "gone.png"]
    with raises("listed-file-missing"):
        list(stream_images(text(tmp_path / "list.txt", "#", "x.png 1", "gone.png")))


# Warnings


def test_problems_of_the_layout(tmp_path):
    top = folder(tmp_path / "s", "a/1.png", "a/2.png", "b/1.png", "b/2.png")
    assert warnings_for(scan_labelled(top)) == []
    folder(top, "1.png", "2.png", "3.png")
    (top / "zebra" / "deep").mkdir(parents=True)
    domain = scan_labelled(top)
    assert (len(domain), domain.classes, domain.empty) == (4, ("a", "b"), ("zebra",))
    (empty, _), (loose, _) = warnings_for(domain.keep([0, 1, 2, 3]))
    assert says(empty, "without an image", "'zebra'")
    assert says(loose, "3 images", f"'{top}'", "beside the class folders")


def test_classes_whose_names_differ_only_in_case(tmp_path):
    folder(tmp_path, "a.png")
    lines = [f"a.png\t{label}" for label in ("Sea lion", "sea lion", "seal")]
    ((problem, _),) = warnings_for(scan_labelled(text(tmp_path / "list.txt", *lines)))
    assert says(problem, "upper and lower case", "'Sea lion'", "'sea lion'")
    assert "seal" not in problem.replace("sea lion", "").lower()


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (["train/cat/1", "train/cat/2", "train/dog/1", "val/cat/1", "val/dog/1"], ("train", "val")),
        (["Test/1", "Test/2", "Test/3", "Train/cat/1", "Train/dog/1"], ("Train", "Test")),  # a test set without labels
        (["test/cat/1", "test/dog/1", "train/cat/1", "train/cat/2", "train/dog/1"], ("train", "test")),
        ([f"{top}/{c}/1" for top in ("amazon", "dslr") for c in ("mug", "pen", "pad")], ("amazon", "dslr")),
        (["train/1", "val/1"], ()),  # nowhere a class
        (["train/images/1", "val/images/1"], ()),
        (["car/1", "train/steam/1", "train/diesel/1"], ()),  # a class of that name
        (["mug/red/1", "mug/blue/1", "mug/old/1", "pen/thin/1", "pen/long/1", "pen/old/1"], ()),  # unlike names
        ([f"{c}/{view}/1" for c in ("mug", "pen", "pad") for view in ("front", "side")], ()),  # views of each class
        ([f"{c}/{part}/1" for c in ("mug", "pen") for part in ("train", "val", "test")], ()),  # splits of each class
        ([f"{c}/images/1" for c in ("mug", "pen")], ()),
        ([f"{c}/{n}/1" for c in ("mug", "pen") for n in ("a", "b", "d", *(c + x for x in "efgh"))], ()),  # most unlike
        (["mug/a/1", "mug/b/1", "mug/c/1", "pen/1"], ()),
    ],
)
def test_warning_about_splits_that_are_taken_for_classes(tmp_path, names, splits):
    top = folder(tmp_path / "s", *(f"{name}.png" for name in names))
    domain = scan_labelled(top)
    assert domain.splits == splits
    assert len(warnings_for(domain)) == bool(splits)
    for problem, advice in warnings_for(domain):
        assert f"'{splits[0]}', '{splits[1]}'" in problem
        assert says(advice, f"give '{top}/{splits[0]}'", "source")
