"""Promises that every method in the table must keep, whatever it computes. A new method is tested here by being in the
table; so is the example of docs/methods.md, which has a teacher that is served."""

import csv
import dataclasses
import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import yaml
from safetensors.torch import load_file
from timm.models import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

import cdtrans
from cdtrans.config import make_config
from cdtrans.methods import METHODS, method_class
from cdtrans.methods.base import Batch, Method, Sizes
from cdtrans.network.network import Head, Network
from cdtrans.run.pipeline import make_method
from cdtrans.runtime.screen import Screen
from cdtrans.serving.export import export
from cdtrans.training.adaptation import training_step
from cdtrans.training.optimisation import Optimisation
from cdtrans.training.step import WARM_UP, Memory, Step
from commands import Ended, Process, start_ranks, warm
from tiny_task import CLASSES, Task, log_lines, make_task, tree

pytestmark = pytest.mark.slow

NAMES_PATHS = ("images.csv", "predictions.csv", "data.json", "config.yaml")  # these name files
GUIDE = Path(__file__).parents[2] / "docs" / "methods.md"
FAST = {"constants": {"cdtrans.pairing.graphs.ROUNDS": 2, "cdtrans.pairing.graphs.STEPS": 3}}
EXAMPLE = "my_file.py:MinimumEntropy"  # the guide's own
ON_CONVOLUTIONS = [name for name in METHODS if method_class(name).backbones not in ("any", "ViT")]
RESNET = {"backbone": "test_resnet", "backbone_args": {"block_args": {"attn_layer": "se"}}}


class Runs:
    """Runs of one method, started together: one that nothing happens to, one that is killed in stage 2 and whose target
    images lie in folders of wrong classes under other names, and one in two processes."""

    def __init__(self, name: str, task: Task) -> None:
        self.name, self.task = name, task
        self.folder = task.folder / name.replace(":", "-")
        self.method = placed(name, task)
        self.run, self.killed, self.two = (self.folder / part for part in ("run", "killed", "two"))
        crash = {"name": "state.pt", "when": "after", "nth": 9 if method_class(self.method).trains else 7}
        undisturbed = self.start(self.run)
        self.victim = self.start(self.killed, "--save-every", "0", target=self.moved(), crash=crash)
        ranks = 0 if name in ON_CONVOLUTIONS else 2  # several ranks refuse BatchNorm in a backbone
        self.ranks = start_ranks(ranks, self.command(self.two), self.folder / "logs", **FAST)
        succeed(undisturbed.wait())

    def command(self, out: Path, *flags: str, **changes: Any) -> list[str]:
        kind = method_class(self.method)
        options = [word for key, value in small(kind).items() for word in ("--set", f"{key}={value}")]
        epochs = [] if kind.trains else ["--epochs", "1"]
        if self.name in ON_CONVOLUTIONS:
            changes = {"config": self.task.folder / "resnet.yaml"} | changes
        return dataclasses.replace(self.task, **changes).adapt(out, "--method", self.method, *options, *epochs, *flags)

    def start(self, out: Path, *flags: str, crash: dict[str, Any] | None = None, **changes: Any) -> Process:
        return warm().start(self.command(out, *flags, **changes), self.folder / "logs", crash=crash, **FAST)

    def moved(self) -> Path:
        order = random.Random(0).sample(range(21), 21)
        for n in range(21):
            place = self.folder / "target" / CLASSES[(n + order[n]) % 3] / f"{order[n]}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.task.target / f"{n:02}.png", place)
        return self.folder / "target"


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    """Without stochastic depth, which each rank draws for its own images."""
    short = {"source_epochs": 1, "epochs": 2, "rebuild_every": 1, "save_every": 30, "drop_path": 0.0}
    task = make_task(tmp_path_factory.mktemp("contract"), **short)
    (task.folder / "my_file.py").write_text(example(), encoding="utf-8")
    resnet = yaml.safe_load(task.config.read_text()) | RESNET
    (task.folder / "resnet.yaml").write_text(yaml.safe_dump(resnet))
    return task


def example() -> str:
    found = re.search(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert found is not None
    return found.group(1)


def small(kind: type[Method]) -> dict[str, Any]:
    """Options that make a method's own modules as small as the network, and its epochs as short as the others'."""
    sizes = {"hidden": 16, "length": 0.01}
    return {field.name: sizes[field.name] for field in dataclasses.fields(kind.Options) if field.name in sizes}


def placed(name: str, task: Task) -> str:
    """A method as --method takes it."""
    return name if name in METHODS else str(task.folder / name)


@pytest.fixture(scope="module", params=[*METHODS, EXAMPLE])
def runs(request: pytest.FixtureRequest, task: Task) -> Runs:
    return Runs(request.param, task)


exported: set[tuple[Any, ...]] = set()


def succeed(ended: Ended) -> None:
    assert ended.code == 0, ended.err


def test_neither_a_kill_nor_moved_labels_change_a_byte(runs: Runs) -> None:
    """Killed after the state is written the ninth time. Other moments are the same for all methods:
    tests/end_to_end/test_resume.py has them."""
    assert runs.victim.wait().code == -9
    assert (runs.killed / "source").exists(), "stage 2 had begun"
    assert not (runs.killed / "result.json").exists()
    succeed(runs.start(runs.killed, target=runs.folder / "target").wait())
    ours, theirs = tree(runs.killed), tree(runs.run)
    assert ours.keys() == theirs.keys()
    assert [k for k in ours if k not in NAMES_PATHS and ours[k] != theirs[k]] == []
    assert ours["images.csv"] != theirs["images.csv"]


def test_two_ranks_compute_what_one_computes(runs: Runs) -> None:
    for rank in runs.ranks:
        succeed(rank.wait())
    if not runs.ranks:
        pytest.skip("several ranks refuse BatchNorm in a backbone")
    ours, theirs = log_lines(runs.two), log_lines(runs.run)
    assert [line["event"] for line in ours] == [line["event"] for line in theirs]
    for a, b in zip(ours, theirs, strict=True):
        for key, value in b.items():
            assert a[key] == (pytest.approx(value, rel=5e-3, abs=5e-4) if isinstance(value, float) else value), key
    two = load_file(runs.two / "last" / "model.safetensors")
    for key, tensor in load_file(runs.run / "last" / "model.safetensors").items():
        torch.testing.assert_close(two[key], tensor, atol=2e-3, rtol=2e-2, msg=lambda m, k=key: f"{k}: {m}")


def test_the_served_model_survives_save_load_predict_and_export(runs: Runs, tmp_path: Path) -> None:
    with open(runs.run / "predictions.csv", newline="") as file:
        rows = {row["path"]: (row["label"], float(row["probability"])) for row in csv.DictReader(file)}
    classifier = cdtrans.load(runs.run, device="cpu")
    for prediction in classifier.predict(runs.task.target):
        assert prediction.path is not None
        label, probability = rows[prediction.path.name]
        assert prediction.label == label
        assert prediction.probability == pytest.approx(probability, abs=1e-4)
    model = classifier.model
    plain = isinstance(model.head, Head) and model.transferability is None  # timm can hold it, which is much faster
    kind = (type(model.head), model.transferability is None, runs.name in ON_CONVOLUTIONS)
    if plain or kind not in exported:  # each kind of network once
        file = tmp_path / ("model.safetensors" if plain else "model.onnx")
        assert export(runs.run, file, model="adapted").difference < 1e-4
        exported.add(kind)
    assert json.loads((runs.run / "adapted" / "model.json").read_text())["method"] == placed(runs.name, runs.task)


def test_a_class_that_does_not_occur_is_never_predicted(runs: Runs) -> None:
    out = runs.folder / "told"
    succeed(runs.start(out, "--target-classes", "blue,red").wait())
    with open(out / "predictions.csv", newline="") as file:
        assert {row["label"] for row in csv.DictReader(file)} <= {"blue", "red"}
    assert cdtrans.load(out, model="adapted", device="cpu").classes == ("blue", "red")
    assert json.loads((out / "result.json").read_text())["class_set"]["absent"] == ["green"]


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        *((name, ["trade_off"]) for name in ("minent", "bnm", "mcc", "dann", "cdan_e", "cdan_tn", "atdoc_na")),
        *(("cdan_bsp", ["trade_off", "spectral"]), ("cat", ["trade_off", "clustering"])),
        *(("ssrt", ["trade_off", "refinement"]), ("safn_ent", ["trade_off", "entropy"])),
        ("mstn", ["semantic", "critic"]),
    ],
)
def test_at_weight_0_it_is_plain_training_on_the_source(name: str, weights: list[str]) -> None:
    kind = method_class(name)

    class SourceLoss(kind):  # type: ignore[misc, valid-type]
        """The same method, with the source's loss alone."""

        def losses(self, batch: Batch, progress: Tensor) -> dict[str, Tensor]:
            return {"loss_source": super().losses(batch, progress)["loss_source"]}

    plain, _ = trained(SourceLoss, {}, device="cpu")
    at_zero, losses = trained(kind, dict.fromkeys(weights, 0.0), device="cpu")
    assert {k: v.tolist() for k, v in at_zero.items()} == {k: v.tolist() for k, v in plain.items()}
    adapted, _ = trained(kind, {}, device="cpu")
    assert any(not torch.equal(adapted[key], plain[key]) for key in plain), "at its own weight it is not"
    assert len(losses) == STEPS


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
@pytest.mark.parametrize("name", [*(name for name in METHODS if method_class(name).trains), EXAMPLE])
def test_a_captured_step_is_a_plain_step(name: str, task: Task) -> None:
    """Without dropout and stochastic depth, whose random numbers a captured step draws in another order; and with
    convolutions in float32 and of one order. By default cuDNN rounds their factors to TF32 (2^-11, relative) and adds
    up gradients as its threads come, so that equal runs of a network with BatchNorm over six images drift apart."""
    kind = method_class(placed(name, task))
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        plain, plain_losses = trained(kind, {}, device="cuda", plan="off")
        fast, fast_losses = trained(kind, {}, device="cuda", plan="graph")
    torch.testing.assert_close(torch.stack(fast_losses), torch.stack(plain_losses), atol=2e-3, rtol=2e-3)
    for key, value in plain.items():
        torch.testing.assert_close(fast[key], value, atol=2e-3, rtol=2e-2, msg=lambda m, k=key: f"{k}: {m}")


STEPS = WARM_UP + 5


def trained(
    kind: type[Method], options: dict[str, Any], *, device: str, plan: str = "off"
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The network after a few steps of a method, and the losses of each step."""
    torch.manual_seed(0)
    backbone: Any = VisionTransformer(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=0)
    if kind.backbones not in ("any", "ViT"):
        backbone = timm.create_model(RESNET["backbone"], num_classes=0, **RESNET["backbone_args"])
    network = Network(backbone, Head(backbone.num_features, 5, "batchnorm"))
    config = make_config({"precision": "fp32", "method": "x.py:X", "method_args": small(kind) | options})
    method = make_method(kind, network, config, Sizes(classes=5, source_images=40, target_images=30)).to(device).train()
    optimisation = Optimisation(
        method, config, lr=0.05, epochs=40, device=torch.device(device), rates=method.rates(), network=network
    )
    for module in method.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    memory = Memory(method, "pairs", Screen())
    step = Step(training_step(method, optimisation), optimisation, memory, plan, capturable=method.capturable)
    step.ahead = 1000
    losses = []
    for i in range(STEPS):
        optimisation.start_epoch(1 + i // 4)
        generator = torch.Generator().manual_seed(i)
        torch.manual_seed(i)
        x = torch.randn(2, 6, 3, 32, 32, generator=generator)
        y = torch.randint(5, (2, 6), generator=generator)
        soft = F.one_hot(y[1], 5).float()
        batch = Batch(x[0], y[0], x[1], soft, torch.arange(6), torch.ones(6))
        inputs = [tensor.to(device) for tensor in (*batch, torch.tensor(i / STEPS))]
        losses.append(step(*inputs).clone())
    if plan == "graph" and method.capturable:
        assert step.graph is not None, "the step was captured"
    return {key: value.cpu() for key, value in method.served().state_dict().items()}, losses
