"""Stage 2: pair, train, repeat (FACTS 3). No target label comes in here: `target` is images and nothing else."""

import torch
from torch import Tensor

from cdtrans.config import Config
from cdtrans.data.batches import Images
from cdtrans.model.branches import CDTrans
from cdtrans.model.encoding import Encoded, Encoder
from cdtrans.pairing.pairs import Pairs, build_pairs, require_pairs
from cdtrans.ranks import part
from cdtrans.run import Run
from cdtrans.screen import Screen
from cdtrans.training.losses import adaptation_losses
from cdtrans.training.optimisation import Optimisation
from cdtrans.training.reporting import StageReport
from cdtrans.training.state import Loop, step_seed
from cdtrans.training.step import Step

LOSSES = ("loss_source", "loss_target", "loss_distillation")


def adapt_to_target(
    run: Run, model: CDTrans, source: Images, labels: Tensor, target: Images, config: Config, screen: Screen
) -> Encoded:
    """Train the model on pairs that are searched anew every few epochs; returns the target as it sees it at the end."""
    optimisation = Optimisation(model, config, lr=config.lr, epochs=config.epochs, device=target.device)
    loop = Loop(run, "adaptation", model, optimisation, config=config, epochs=config.epochs)
    report = StageReport(run, screen, loop, config)

    def losses(x_s: Tensor, x_t: Tensor, y_s: Tensor, y_t: Tensor) -> tuple[Tensor, ...]:
        return adaptation_losses(model(x_s, x_t), y_s, y_t, config.detach_teacher)

    pairs = Pairs(**loop.extras["pairs"]).to(target.device) if "pairs" in loop.extras else None
    train = Step(model, losses, optimisation, config.compile, screen)
    encode = Encoder(model, config, screen)
    encode.ahead = (config.epochs - loop.epoch + 1) * (len(target) + len(source) // config.rebuild_every)
    encoded = encode(target, "target")
    if loop.epoch == 1 and loop.step == 0:
        save_predictions(run, 0, encoded)

    for epoch in loop.epochs():
        if loop.step == 0 and (epoch - 1) % config.rebuild_every == 0:
            encoded_source = encode(source, "source")
            pairs = find_pairs(run, epoch, encoded_source, labels, encoded, config, screen)
            loop.extras["pairs"] = vars(pairs)
        assert pairs is not None, "the first epoch searches for pairs"
        lr = optimisation.start_epoch(epoch, loop.step)
        batch_size = min(config.batch_size, len(pairs))
        batches = [slice(i * batch_size, (i + 1) * batch_size) for i in range(len(pairs) // batch_size)]
        train.ahead = len(batches) * (config.epochs - epoch + 1)
        generator = torch.Generator().manual_seed(step_seed(config.seed, "adaptation", epoch, 0))
        order = torch.randperm(len(pairs), generator=generator)[: len(batches) * batch_size].to(target.device)
        mine = [part(batch) for batch in batches]
        x_s = source.plan(pairs.source[order], mine, config.flip, generator)
        x_t = target.plan(pairs.target[order], mine, config.flip, generator)
        y_s, y_t = pairs.source_labels[order], pairs.target_labels[order]  # [P]
        model.train()
        with report.epoch(steps=len(batches), images=2 * batch_size, lr=lr, note=f"{len(pairs)} pairs") as bar:
            for step in loop.steps(len(batches)):
                batch = batches[step]
                loop.update(train(x_s[step], x_t[step], y_s[batch], y_t[batch]))
                bar.advance()
        report.write(dict(zip(LOSSES, loop.mean_losses(), strict=True)), pairs=len(pairs))
        encoded = encode(target, "target")
        save_predictions(run, epoch, encoded)
    return encoded


def find_pairs(
    run: Run,
    epoch: int,
    source: Encoded,
    labels: Tensor,
    target: Encoded,
    config: Config,
    screen: Screen,
) -> Pairs:
    """The pairs of the next epochs, by the model as it is now."""
    pairs = build_pairs(
        source.features,
        labels,
        target.features,
        target.logits,
        center_aware=config.center_aware,
        mutual=config.mutual_pairs,
    )
    number = (epoch - 1) // config.rebuild_every + 1
    run.write_arrays(f"pairs/round-{number:02}.npz", pairs.arrays())
    run.log("pairs", round=number, epoch=epoch, **pairs.summary())
    s = pairs.summary()
    screen.say(
        f"round {number}: {s['kept']} of {s['proposed']} pairs kept, using {s['sources_used']} source and "
        f"{s['targets_used']} target images of {s['classes_used']} classes"
    )
    require_pairs(pairs, number)
    return pairs


def save_predictions(run: Run, epoch: int, encoded: Encoded) -> None:
    """The predicted class of every target image after an epoch (0: the source-only model). An answer key, if there ever
    is one, can then score every epoch afterwards, and training never has to see it."""
    predicted = encoded.logits.argmax(dim=1).to(torch.int32).cpu().numpy()
    run.write_arrays(f"predictions/epoch-{epoch:03}.npz", {"predicted": predicted})
