"""Stage 1: fit the network, or only its head, to the labelled source (docs/method.md)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdtrans.config import Config
from cdtrans.inputs.batches import Images
from cdtrans.network.encoding import Encoder
from cdtrans.network.network import Head, Network
from cdtrans.pairing.graphs import LOOSE, Statistics, fit_probe
from cdtrans.record.run import RunWriter
from cdtrans.runtime.ranks import part, world
from cdtrans.runtime.screen import Screen
from cdtrans.training.loop import Loop, step_seed
from cdtrans.training.optimisation import Optimisation
from cdtrans.training.step import Memory, Step


def fit_source(
    run: RunWriter, network: Network, images: Images, labels: Tensor, config: Config, screen: Screen
) -> None:
    """Train on every source image in each epoch; the last epoch is the source-only model."""
    optimisation = Optimisation(network, config, lr=config.source_lr, epochs=config.source_epochs, device=images.device)
    memory = Memory(network, "images", screen)
    parts, epochs = {"memory": memory}, config.source_epochs
    loop = Loop(run, "source", network, optimisation, screen, config=config, epochs=epochs, parts=parts)

    def fit(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        loss = F.cross_entropy(network.encode(x).logits, y, label_smoothing=config.label_smoothing)
        optimisation.update(loss)
        return {"loss": loss}

    step = Step(fit, optimisation, memory, config.compile)
    with loop.kept():
        for epoch in loop.epochs():
            loop.train(step, ImageBatches(images, labels, config, epoch), images=config.batch_size)


class ImageBatches:
    """The inputs of an epoch's steps: all images in random order, and their labels."""

    def __init__(self, images: Images, labels: Tensor, config: Config, epoch: int) -> None:
        self.slices = batch_slices(len(images), config.batch_size)
        generator = torch.Generator().manual_seed(step_seed(config.seed, "source", epoch, 0))
        order = torch.randperm(len(images), generator=generator)  # [Ns]
        self.y = labels[order.to(labels.device)].to(images.device)
        self.x = images.plan(order, [part(batch) for batch in self.slices], config.flip, generator)

    def __len__(self) -> int:
        return len(self.slices)

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        return self.x[step], self.y[self.slices[step]]


@torch.no_grad()
def probe_source(
    run: RunWriter, network: Network, images: Images, labels: Tensor, *, encode: Encoder, classes: int
) -> None:
    """Leave the backbone as it is and fit the head by ridge regression on its features."""
    head = network.head
    assert isinstance(head, Head), "stage 1 starts with a plain one"
    head.neck.train(False)
    if isinstance(head.neck, nn.BatchNorm1d):
        head.neck.reset_running_stats()
    features = encode(images, "source").features
    with run.timed("probe"):
        statistics = Statistics.of(features)
        y = F.one_hot(labels, classes).to(features)
        weight, bias = fit_probe(statistics.standardised(features), y, LOOSE)
        weight = weight / (statistics.variance + 1e-5).sqrt()[:, None]
        if isinstance(head.neck, nn.BatchNorm1d):
            assert head.neck.running_mean is not None, "it keeps statistics"
            head.neck.running_mean.copy_(statistics.mean)
        else:
            bias = bias - statistics.mean @ weight
        head.classifier.weight.copy_(weight.T)
        if head.classifier.bias is not None:
            head.classifier.bias.copy_(bias)


def batch_slices(count: int, size: int) -> list[slice]:
    """Batches of `count` images in order. A last batch of one image is left out, as the authors do: it has no variance
    for the bottleneck norm. So is one of fewer images than ranks."""
    slices = [slice(start, min(start + size, count)) for start in range(0, count, size)]
    return [s for s in slices if s.stop - s.start >= max(2, world())]
