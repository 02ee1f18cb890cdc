"""Stage 1: fit the model to the labelled source (docs/method.md, section 2)."""

import torch
from torch import Tensor

from cdtrans.config import Config
from cdtrans.data.batches import Images
from cdtrans.model.network import Network
from cdtrans.runtime.ranks import part, world
from cdtrans.runtime.screen import Screen
from cdtrans.storage.run import Run
from cdtrans.training.losses import source_loss
from cdtrans.training.optimisation import Optimisation
from cdtrans.training.reporting import StageReport
from cdtrans.training.state import Loop, step_seed
from cdtrans.training.step import Step


def fit_source(run: Run, model: Network, images: Images, labels: Tensor, config: Config, screen: Screen) -> None:
    """Train on every source image in each epoch; the last epoch is the source-only model."""
    optimisation = Optimisation(model, config, lr=config.source_lr, epochs=config.source_epochs, device=images.device)
    loop = Loop(run, "source", model, optimisation, config=config, epochs=config.source_epochs)
    report = StageReport(run, screen, loop, config)
    batches = batch_slices(len(images), config.batch_size)

    def losses(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return (source_loss(model.encode(x).logits, y, config.label_smoothing),)

    train = Step(losses, optimisation, config.compile)
    for epoch in loop.epochs():
        lr = optimisation.start_epoch(epoch, loop.step)
        train.ahead = len(batches) * (config.source_epochs - epoch + 1)
        generator = torch.Generator().manual_seed(step_seed(config.seed, "source", epoch, 0))
        order = torch.randperm(len(images), generator=generator)  # [Ns]
        shuffled_labels = labels[order.to(labels.device)]
        inputs = images.plan(order, [part(batch) for batch in batches], config.flip, generator)
        model.train()
        with report.epoch(steps=len(batches), images=config.batch_size, lr=lr) as bar:
            for step in loop.steps(len(batches)):
                loop.update(train(inputs[step], shuffled_labels[batches[step]]))
                bar.advance()
        report.write({"loss": loop.mean_losses()[0]})


def batch_slices(count: int, size: int) -> list[slice]:
    """All of `count` in order. A last batch of one image is left out, as the authors do: it has no variance for the
    bottleneck norm. So is one of fewer images than ranks."""
    slices = [slice(start, min(start + size, count)) for start in range(0, count, size)]
    return [s for s in slices if s.stop - s.start >= max(2, world())]
