from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdtrans.config import Config, make_config
from cdtrans.inputs.batches import Images
from cdtrans.network.network import Network, Output
from cdtrans.record.run import RunWriter
from cdtrans.runtime.screen import Screen
from cdtrans.training import source as source_module
from cdtrans.training.optimisation import Optimisation
from cdtrans.training.source import batch_slices, fit_source
from run_folders import DATA
from tiny_task import log_lines

CPU = torch.device("cpu")


def settings(**values: Any) -> Config:
    base = {"device": "cpu", "precision": "fp32", "batch_size": 8, "source_epochs": 3}
    return make_config(base | {"source_lr": 0.5, "warmup_epochs": 1} | values)


def numbered(count: int) -> Images:
    """Image n is n all over, so that a crop still tells which image it is of."""
    pixels = np.broadcast_to(np.arange(count, dtype=np.uint8)[:, None, None, None], (count, 6, 6, 3)).copy()
    return Images(pixels, np.arange(count), crop=4, mean=(0.0,) * 3, std=(1.0,) * 3, device=CPU)


class Probe(nn.Module):
    """In place of a model: learns from nothing but the mean brightness, and remembers which images it saw."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.classifier = nn.Linear(1, classes)
        self.seen: list[list[int]] = []

    def encode(self, images: Tensor) -> Output:
        assert self.training
        brightness = images.mean(dim=(1, 2, 3))[:, None]
        self.seen.append((brightness[:, 0] * 255).round().int().tolist())
        return Output(brightness, self.classifier(brightness))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunWriter]:
    run = RunWriter.open(tmp_path / "run", settings(), DATA)
    yield run
    run.close()


def watch_loss(monkeypatch: pytest.MonkeyPatch, record: Callable[[Tensor, float], Any]) -> None:
    """`record` the labels and the smoothing of every step's loss."""

    def recorded(logits: Tensor, y: Tensor, label_smoothing: float) -> Tensor:
        record(y, label_smoothing)
        return F.cross_entropy(logits, y, label_smoothing=label_smoothing)

    monkeypatch.setattr(source_module, "F", SimpleNamespace(cross_entropy=recorded))


class OneBatch:
    """In place of `Images`: all of these, as they are."""

    def __init__(self, images: Tensor) -> None:
        self.images, self.device, self.order = images, CPU, torch.empty(0)

    def __len__(self) -> int:
        return len(self.images)

    def plan(self, order: Tensor, batches: list[slice], *how: Any) -> list[Tensor]:
        assert len(batches) == 1
        self.order = order
        return [self.images[order]]


def test_loss_gradients_and_statistics_equal_the_authors(
    run: RunWriter, tiny: tuple[Network, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    network, g = tiny
    losses: list[Tensor] = []
    logits: list[Tensor] = []

    def update(self: Optimisation, loss: Tensor) -> None:
        losses.append(loss.detach())
        loss.backward()

    monkeypatch.setattr(Optimisation, "update", update)
    network.head.register_forward_hook(lambda head, inputs, out: logits.append(out.logits.detach()))
    images = OneBatch(g["x_s"])
    config = settings(batch_size=64, source_epochs=1, label_smoothing=0.1)
    fit_source(run, network, images, g["y_s"], config, Screen(quiet=True))  # type: ignore[arg-type]
    (loss,), (given,) = losses, logits
    assert not torch.equal(images.order, torch.arange(len(images))), "shuffled"
    torch.testing.assert_close(given[images.order.argsort()], g["pretrain/logits"], atol=1e-10, rtol=0)
    torch.testing.assert_close(loss, g["pretrain/loss_smooth01"], atol=0, rtol=1e-7)
    head, block = network.head, network.backbone.blocks[0]
    torch.testing.assert_close(head.classifier.weight.grad, g["pretrain/grad_classifier"], atol=1e-7, rtol=1e-6)
    torch.testing.assert_close(block.attn.qkv.weight.grad, g["pretrain/grad_qkv0"], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(head.neck.running_mean, g["pretrain/running_mean_after"], atol=1e-10, rtol=0)
    torch.testing.assert_close(head.neck.running_var, g["pretrain/running_var_after"], atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    ("count", "size", "lengths"),
    [
        (10, 4, [4, 4, 2]),
        (9, 4, [4, 4]),  # a last batch of one image has no variance and is left out, as the authors do
        (8, 4, [4, 4]),
        (3, 64, [3]),
        (2, 64, [2]),
        (65, 64, [64]),
    ],
)
def test_batches_cover_everything_but_a_last_one_of_one_image(count: int, size: int, lengths: list[int]) -> None:
    slices = batch_slices(count, size)
    assert [s.stop - s.start for s in slices] == lengths
    assert [n for s in slices for n in range(count)[s]] == list(range(sum(lengths)))


def test_every_image_comes_once_in_an_epoch_in_another_order_each_time_and_with_its_own_label(
    run: RunWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, labels, batches = 20, torch.arange(20) % 3, []
    watch_loss(monkeypatch, lambda y, smoothing: batches.append(y.tolist()))
    model = Probe()
    fit_source(run, model, numbered(count), labels, settings(), Screen(quiet=True))  # type: ignore[arg-type]
    assert len(model.seen) == 3 * 3
    for images, given in zip(model.seen, batches, strict=True):
        assert [n % 3 for n in images] == given
    epochs = [[n for batch in model.seen[3 * e : 3 * e + 3] for n in batch] for e in range(3)]
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_label_smoothing_and_the_learning_rate_reach_the_training(
    run: RunWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = set()
    watch_loss(monkeypatch, lambda y, smoothing: given.add(smoothing))
    config = settings(label_smoothing=0.3, source_lr=0.1, source_epochs=12, warmup_epochs=10)
    fit_source(run, Probe(), numbered(20), torch.arange(20) % 3, config, Screen(quiet=True))  # type: ignore[arg-type]
    assert given == {0.3}
    # docs/method.md, section 2.1: from 1 % of the rate upwards during the warm-up
    rates = [line["lr"] for line in log_lines(run.folder)]
    assert rates[:2] == pytest.approx([0.0109, 0.001 + 2 * 0.0099])


def test_it_learns_and_logs_the_mean_loss_of_every_epoch(run: RunWriter, capsys: pytest.CaptureFixture[str]) -> None:
    """Bright against dark, which the probe can tell apart."""
    labels = (torch.arange(200) >= 100).long()
    config = settings(source_epochs=8, batch_size=16, source_lr=20, label_smoothing=0, clip_norm=100)
    fit_source(run, Probe(2), numbered(200), labels, config, Screen())  # type: ignore[arg-type]
    lines = log_lines(run.folder)
    assert [(line["event"], line["stage"], line["epoch"]) for line in lines] == [
        ("epoch", "source", e + 1) for e in range(8)
    ]
    assert lines[-1]["loss"] < 0.5 * lines[0]["loss"]
    assert [line[:11] for line in capsys.readouterr().out.splitlines()] == [f"source {n}/8 " for n in range(1, 9)]
