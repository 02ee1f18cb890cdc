"""`check` on real files, broken in the ways in which files break."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import save_file

import cdtrans.run.check as verb
from cdtrans.errors import WeightsUnavailable
from cdtrans.inputs import stream
from cdtrans.network.backbone import create_backbone
from cdtrans.run.check import PROBED, Check, check, draw_sample
from cdtrans.run.pipeline import adapt
from cdtrans.runtime.screen import Screen
from support import Notes, raises, says
from tiny_task import CLASSES, TINY, Task, draw, log_lines, make_task, tree

MODEL_FREE = [
    "source layout",
    "source files",
    "target files",
    "ignored files, source",
    "ignored files, target",
    "classes",
    "balance",
    "target size",
    "copies in the source",
    "labels of copies",
    "copies across domains",
    "blank images, source",
    "blank images, target",
    "greyscale",
    "image sizes, source",
    "image sizes, target",
    "transparency",
]
BACKBONE = f"{TINY['backbone']}.augreg_in21k_ft_in1k"  # timm's default tag
WITH_MODEL = ["separability", "mislabelled images", "domain distance", "classes that occur", "images of no class"]


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return make_task(tmp_path / "task")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights."""
    vit = create_backbone(TINY["backbone"], crop=TINY["crop"], drop_path=0, args=TINY["backbone_args"])
    file = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    save_file(vit.state_dict(), file)
    return file


def checked(task: Task, screen: Screen | None = None, **settings) -> Check:
    config = {"config": task.config, "screen": screen or Screen(quiet=True)}
    return check(source=task.source, target=task.target, **config | settings)


def states(result: Check) -> dict[str, str]:
    return {f.subject: f.state for f in result.findings if f.state != "ok"}


def details(result: Check, subject: str) -> dict:
    (found,) = [f for f in result.findings if f.subject == subject]
    return found.details


def test_a_clean_task_and_nothing_is_written_but_the_cache(task: Task) -> None:
    before = tree(task.folder)
    result = checked(task)
    assert [f.subject for f in result.findings] == MODEL_FREE
    assert states(result) == {}
    assert (result.state, result.backbone) == ("ok", None)
    assert "pretrained weights" in result.skipped
    after = {k: v for k, v in tree(task.folder).items() if k.split("/")[0] != "cache"}
    assert after == before


@pytest.mark.slow
def test_what_check_has_decoded_adapt_need_not(task: Task, monkeypatch) -> None:
    checked(task)

    def decode(path: Path) -> Image.Image:
        raise AssertionError(f"{path} is decoded again")

    monkeypatch.setattr(stream, "decode", decode)
    adapt(source=task.source, target=task.target, out=task.folder / "run", config=task.config, quiet=True)


def test_broken_files_are_named_with_their_cause(task: Task) -> None:
    whole = (task.source / "red" / "00.png").read_bytes()
    (task.source / "red" / "00.png").write_bytes(whole[: len(whole) // 2])
    (task.target / "00.png").write_bytes(b"")
    (task.target / "01.png").write_bytes(b"<html>404 Not Found</html>")
    (task.target / "02.png").unlink()
    (task.target / "02.png").symlink_to("nowhere.png")
    result = checked(task, max_bad=0.1)
    assert states(result) == {"source files": "warning", "target files": "stop"}
    assert details(result, "source files")["unreadable"] == {"red/00.png": "truncated"}
    causes = details(result, "target files")["unreadable"]
    assert list(causes) == ["00.png", "01.png", "02.png"]
    for cause, word in zip(causes.values(), ("empty", "not an image", "no such file"), strict=True):
        assert says(cause, word)
    assert "reason to stop" in result.skipped
    assert checked(task, max_bad=0.2).state == "warning"


def test_a_class_and_a_domain_without_a_readable_image(task: Task) -> None:
    for file in (task.source / "green").iterdir():
        file.write_bytes(b"")
    result = checked(task, max_bad=0.9)
    assert states(result) == {"source files": "warning", "classes": "stop"}
    assert details(result, "classes")["images"] == {"blue": 8, "green": 0, "red": 8}
    for file in task.target.iterdir():
        file.write_bytes(b"")
    result = checked(task, max_bad=1.0)
    assert states(result) == {"source files": "warning", "target files": "stop"}
    assert [f.subject for f in result.findings] == MODEL_FREE[:5]


@pytest.mark.slow
def test_what_a_run_notes_is_what_check_finds(task: Task, capsys) -> None:
    """Splits taken for classes, ignored files, and an image under two labels."""
    parts = task.folder / "parts"
    for part in ("train", "val"):
        shutil.copytree(task.source, parts / part)
    for file in (parts / "val").rglob("*.png"):  # other images, else one image has two labels
        with Image.open(file) as image:
            image.transpose(Image.Transpose.ROTATE_180).save(file)
    shutil.copy(parts / "train" / "blue" / "00.png", parts / "val" / "red" / "copy.png")
    (parts / "val" / "red" / "20.heic").touch()
    (task.target / "scan").touch()
    task = dataclasses.replace(task, source=parts)
    result = checked(task)
    subjects = ["source layout", "ignored files, source", "ignored files, target", "labels of copies"]
    assert [*states(result)] == subjects
    assert details(result, "ignored files, source") == {"files": ["val/red/20.heic"]}
    assert details(result, "ignored files, target") == {"files": ["scan"]}
    adapt(source=parts, target=task.target, out=task.folder / "run", config=task.config, quiet=True)
    warnings = capsys.readouterr().err
    for finding in result.findings:
        assert (finding.statement in warnings) == (finding.state != "ok"), finding
    logged = [line["subject"] for line in log_lines(task.folder / "run") if line["event"] == "check"]
    assert logged == subjects[1:]


def test_copies_of_every_kind(task: Task) -> None:
    """A file copied into another class, and target files that are source files: one as it was, one darker."""
    shutil.copy(task.source / "blue" / "00.png", task.source / "red" / "copy.png")
    shutil.copy(task.source / "blue" / "01.png", task.target / "leak.png")
    with Image.open(task.source / "green" / "02.png") as image:
        Image.fromarray((np.asarray(image) * 0.8 + 12).astype(np.uint8)).save(task.target / "again.png")
    result = checked(task)
    assert states(result) == {"labels of copies": "warning", "copies across domains": "warning"}
    assert details(result, "labels of copies")["exact"] == [{"blue/00.png": "blue", "red/copy.png": "red"}]
    assert details(result, "copies across domains") == {
        "exact": [{"target": "leak.png", "source": "blue/01.png"}],
        "near": [{"target": "again.png", "source": "green/02.png"}],
    }


def test_sizes_greyscale_and_transparency(task: Task) -> None:
    """Every target is a greyscale PNG with transparent parts, two of them thin; the source has alpha, and is opaque."""
    for file in task.target.iterdir():
        with Image.open(file) as image:
            grey = image.convert("LA").resize((20, 20))
            grey.putpixel((3, 3), (200, 100))
            grey.save(file)
    for file in task.source.rglob("*.png"):
        with Image.open(file) as image:
            image.convert("RGBA").save(file)
    for name in ("00.png", "01.png"):
        with Image.open(task.target / name) as image:
            image.resize((10, 60)).save(task.target / name)
    result = checked(task)
    assert states(result) == {"greyscale": "warning", "image sizes, target": "warning", "transparency": "warning"}
    assert sorted(details(result, "image sizes, target")["thin"]) == ["00.png", "01.png"]
    assert details(result, "greyscale") == {"source": 0.0, "target": 1.0}
    assert details(result, "transparency") == {"source": 0.0, "target": 1.0}


def test_no_name_of_the_target_decides_anything(task: Task, weights: Path) -> None:
    """Folders named after classes in any way give the same findings, but for the names themselves; what a backbone
    finds would change with the order of the images."""
    plain = checked(task, weights=weights)
    for n, file in enumerate(sorted(task.target.iterdir())):
        place = task.target / CLASSES[(n * 7) % 3]
        place.mkdir(exist_ok=True)
        file.rename(place / f"{n * 31 % 23:02}.png")
    moved = checked(task, weights=weights)
    for before, after in zip(plain.findings, moved.findings, strict=True):
        assert (before.state, before.statement) == (after.state, after.statement)
    assert details(plain, "domain distance") == details(moved, "domain distance")


class TestWithBackbone:
    def test_its_findings_come_last(self, task: Task, weights: Path) -> None:
        result = checked(task, weights=weights)
        assert [f.subject for f in result.findings] == MODEL_FREE + WITH_MODEL
        assert (result.backbone, result.skipped) == (BACKBONE, "")
        assert result.state != "stop"
        assert checked(task, weights=weights) == result

    def test_it_can_be_left_out(self, task: Task, weights: Path) -> None:
        result = checked(task, weights=weights, model=False)
        assert result.backbone is None
        assert "--no-model" in result.skipped

    def test_too_few_images_are_not_looked_at(self, task: Task, weights: Path) -> None:
        """Four of every class, and a target of four."""
        for name in CLASSES[:2]:
            for file in sorted((task.source / name).iterdir())[4:]:
                file.unlink()
        assert "too few images" in checked(task, weights=weights).skipped
        task = make_task(task.folder.with_name("few-targets"))
        for file in sorted(task.target.iterdir())[4:]:
            file.unlink()
        assert "too few images" in checked(task, weights=weights).skipped
        draw(task.target / "fifth.png", 0, seed=200)
        assert checked(task, weights=weights).skipped == ""

    def test_no_more_than_a_sample_is_looked_at(self, task: Task, weights: Path, monkeypatch) -> None:
        monkeypatch.setattr(verb, "PROBED", 20)
        screen = Notes()
        result = checked(task, screen, weights=weights)
        assert details(result, "separability")["images"] == 20
        for share in ("20 of the 24 source images", "20 of the 21 target images"):
            (line,) = [line for line in screen.lines if share in line]
            assert says(line, "backbone", "random")

    def test_a_sample_is_drawn_without_replacement(self) -> None:
        assert draw_sample(10, seed=0) == list(range(10))
        sample = draw_sample(3 * PROBED, seed=0)
        assert sample == sorted(set(sample))
        assert (len(sample), max(sample) > 2 * PROBED) == (PROBED, True)

    def test_weights_out_of_reach_are_a_warning_and_no_error(self, task: Task, monkeypatch) -> None:
        def out_of_reach(vit: object, name: str) -> None:
            raise WeightsUnavailable(f"The weights of '{name}' could not be downloaded", "connect.")

        monkeypatch.setattr("cdtrans.network.weights.load_pretrained", out_of_reach)
        result = checked(task, pretrained=True)
        *others, weights = result.findings
        assert [f.subject for f in others] == MODEL_FREE
        assert (weights.state, weights.subject) == ("warning", "weights")
        assert "connect" not in weights.statement, "the advice is the check's own"
        assert result.backbone is None
        assert "no weights" in result.skipped

    def test_a_file_or_a_name_that_is_wrong_is_an_error(self, task: Task, tmp_path: Path) -> None:
        with raises("no-weights-file"):
            checked(task, weights=tmp_path / "nothing.pth")
        with raises("backbone-unknown"):
            checked(task, backbone="resnet1", pretrained=True)


def test_a_file_that_goes_away_meanwhile(task: Task, monkeypatch) -> None:
    real = verb._read_headers

    def late(files, screen, name):
        files[0].unlink()
        return real(files, screen, name)

    monkeypatch.setattr(verb, "_read_headers", late)
    with raises("image-lost"):
        checked(task)


def test_the_summary_is_json(task: Task) -> None:
    summary = json.loads(json.dumps(checked(task).summary()))
    assert summary.keys() == {"state", "findings", "backbone", "skipped"}
    for finding in summary["findings"]:
        assert finding.keys() == {"state", "subject", "found", "advice", "details"}
