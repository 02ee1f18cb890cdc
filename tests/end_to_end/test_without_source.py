"""`adapt --target TARGET --source-model RUN_OR_FILE --method shot`: no source images at all."""

import shutil
from pathlib import Path

import pytest
import timm
import torch
import yaml
from safetensors.torch import save_file

from cdtrans.network.network import Head, Network
from cdtrans.network.weights import load_classifier, load_model
from cdtrans.record.record import RunRecord
from commands import Ended, cold, warm
from support import error_says, says
from tiny_task import CLASSES, TINY, Task, make_task, tree

SHOT = ("--method", "shot")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    return make_task(tmp_path_factory.mktemp("task"), source_epochs=2, epochs=2, rebuild_every=1, guard=True)


@pytest.fixture(scope="module")
def with_source(task: Task) -> Path:
    ended = warm().run(task.adapt(task.folder / "with", *SHOT, "--no-guard"), task.folder / "logs")
    assert ended.code == 0, ended.err
    return task.folder / "with"


def alone(task: Task, out: Path, *flags: str, **how: object) -> Ended:
    command = ["adapt", "--target", str(task.target), "--out", str(out), "--config", str(task.config), *SHOT, *flags]
    return warm().run(command, task.folder / "logs", **how)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def without(task: Task, with_source: Path) -> Path:
    """From the same source-only model. All else that describes it comes from its card, not from flags."""
    out, other = task.folder / "without", task.folder / "other.yaml"
    names = ("backbone", "backbone_args", "crop", "resize")
    settings = {k: v for k, v in yaml.safe_load(task.config.read_text()).items() if k not in names}
    other.write_text(yaml.safe_dump(settings))
    command = ["adapt", "--target", str(task.target), "--out", str(out), "--config", str(other), *SHOT]
    ended = warm().run([*command, "--source-model", str(with_source), "--report"], task.folder / "logs")
    assert ended.code == 0, ended.err
    assert says(ended.out + ended.err, "no images", "cannot tell", "without them it was not checked")
    return out


@pytest.mark.slow
class TestFromARun:
    def test_it_is_bit_for_bit_the_run_with_source_images(self, with_source: Path, without: Path) -> None:
        for name in ("adapted/model.safetensors", "last/model.safetensors", "source/model.safetensors", "logits.npz"):
            assert (without / name).read_bytes() == (with_source / name).read_bytes(), name
        assert tree(without / "predictions") == tree(with_source / "predictions")

    def test_nothing_is_judged_or_estimated(self, without: Path) -> None:
        record = RunRecord(without)
        outcome = record.outcome
        assert (outcome.verdict.kind, outcome.choice.model) == ("unknown", "adapted")
        assert [finding.code for finding in outcome.verdict.findings] == ["no-source-images"]
        assert (outcome.basis, outcome.estimate, record.card("adapted").temperature) == (None, None, 1.0)

    def test_the_record_knows_no_source_image(self, without: Path) -> None:
        record = RunRecord(without)
        assert record.images.paths["source"] == record.images.paths["holdout"] == ()
        assert (record.data.source.images, record.data.source.classes) == (0, dict.fromkeys(CLASSES, 0))
        assert all(line["sources_used"] == 0 and "source_accuracy" not in line for line in record.events("pairs"))

    def test_the_report_is_whole(self, without: Path) -> None:
        page = (without / "report.html").read_text()
        assert "cannot be shown" not in page
        for sentence in ("This run had no source images.", "no source image takes part", "not checked"):
            assert sentence in page

    def test_killed_and_resumed_even_if_the_model_is_gone(
        self, task: Task, with_source: Path, without: Path, tmp_path: Path
    ) -> None:
        model, out = tmp_path / "model", tmp_path / "run"
        shutil.copytree(with_source / "source", model / "source")
        flags = ("--source-model", str(model))
        crash = {"name": "state.pt", "when": "after", "nth": 4}
        assert alone(task, out, *flags, crash=crash).code == -9
        shutil.rmtree(model)
        ended = alone(task, out, *flags)
        assert ended.code == 0, ended.err
        assert (out / "adapted/model.safetensors").read_bytes() == (without / "adapted/model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_classifier_of_timm_is_adapted(task: Task, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = timm.create_model(TINY["backbone"], num_classes=3, img_size=16, **TINY["backbone_args"])
    file, names = tmp_path / "model.safetensors", tmp_path / "names.txt"
    save_file(model.state_dict(), file)
    names.write_text("\n".join(CLASSES) + "\n")
    out = tmp_path / "run"
    ended = alone(task, out, "--source-model", str(file), "--source-classes", str(names))
    assert ended.code == 0, ended.err
    network, card = load_model(out / "source")
    assert (card.classes, card.neck, card.weights, card.epoch) == (CLASSES, "none", str(file), 0)
    x = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(network.encode(x).logits, model.eval()(x))


class TestLoadClassifier:
    def network(self, classes: int) -> Network:
        backbone = timm.create_model("test_resnet", num_classes=0)
        return Network(backbone, Head(backbone.num_features, classes, "none")).eval()

    def test_what_does_not_fit_is_refused(self, tmp_path: Path) -> None:
        model, file = timm.create_model("test_resnet", num_classes=4), tmp_path / "model.safetensors"
        save_file(model.state_dict(), file)
        with error_says("4 classes", "not 3 of", "--source-classes"):
            load_classifier(self.network(3), file)
        save_file(timm.create_model("test_resnet", num_classes=0).state_dict(), file)
        with error_says("holds no classifier", "'fc'"):
            load_classifier(self.network(3), file)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a model folder that is none, files of weights and names."""
    folder = tmp_path_factory.mktemp("places")
    (folder / "target").mkdir()
    (folder / "empty").mkdir()
    (folder / "weights.pth").write_bytes(b"")
    (folder / "one.txt").write_text("cat\n")
    (folder / "twice.txt").write_text("cat\ndog\ncat\n")
    return folder


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((*SHOT,), ("No source was given", "--source-model")),
        ((*SHOT, "--source-model", "nowhere"), ("no run and no weights file", "nowhere'")),
        ((*SHOT, "--source-model", "empty"), ("no finished stage 1", "empty'")),
        ((*SHOT, "--source-model", "weights.pth"), ("what its classes are", "--source-classes FILE")),
        ((*SHOT, "--source-model", "weights.pth", "--source-classes", "no.txt"), ("no.txt' cannot be read",)),
        ((*SHOT, "--source-model", "weights.pth", "--source-classes", "one.txt"), ("names 1 classes",)),
        ((*SHOT, "--source-model", "weights.pth", "--source-classes", "twice.txt"), ("'cat' twice",)),
    ],
)
def test_what_is_refused(places: Path, tmp_path: Path, flags: tuple[str, ...], words: tuple[str, ...]) -> None:
    command = ["adapt", "--target", "target", "--out", str(tmp_path / "out"), *flags]
    ended = cold().run(command, tmp_path / "logs", folder=places)
    assert ended.code == 2
    assert says(ended.err, *words), ended.err
    assert ended.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_file_needs_a_run_without_source(places: Path, tmp_path: Path, task: Task) -> None:
    command = task.adapt(tmp_path / "out", *SHOT, "--source-model", "weights.pth")
    ended = cold().run(command, tmp_path / "logs", folder=places)
    assert ended.code == 2
    assert says(ended.err, "is a weights file", "leave SOURCE out")
