"""Stage 2: pair, train, repeat (docs/method.md, section 3). No target label comes in: `target` holds images only."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from cdtrans.config import Config
from cdtrans.data.batches import Images, LabelledImages
from cdtrans.errors import Hopeless
from cdtrans.model.cross_attention import three_branches
from cdtrans.model.encoding import Encoded, Encoder
from cdtrans.model.network import Network
from cdtrans.pairing.pairs import Pairs, Search, require_pairs, search_pairs
from cdtrans.runtime.ranks import part
from cdtrans.runtime.screen import Screen
from cdtrans.storage.run import Run
from cdtrans.training.losses import Terms, adaptation_losses
from cdtrans.training.optimisation import Optimisation
from cdtrans.training.reporting import StageReport
from cdtrans.training.self_training import self_trained, self_training_losses
from cdtrans.training.state import Loop, step_seed
from cdtrans.training.step import Losses, Step
from cdtrans.trust.guard import Measure, fell_later, gave_up, judge_adapted, judge_source, objections
from cdtrans.trust.impression import Impression, impression
from cdtrans.trust.watch import Watch

Rearranged = Callable[[Search, Encoded, Encoded], Search]  # other pairs than those found: for ablations alone


class Adaptation(NamedTuple):
    """What stage 2 came to. The model it was given now has the weights of the chosen epoch."""

    before: Impression  # the source-only model
    after: Impression | None  # the chosen epoch; None if there is none
    chosen_epoch: int
    last: dict[str, Tensor]  # the last epoch's weights; empty if training broke off
    measures: list[Measure]  # what speaks for or against the adapted model
    warning: str = ""  # what speaks against the training after the chosen epoch


def adapt_to_target(
    run: Run,
    model: Network,
    source: Images,
    labels: Tensor,
    target: Images,
    holdout: LabelledImages | None,
    config: Config,
    screen: Screen,
    rearranged: Rearranged | None = None,
) -> Adaptation:
    """Train the model on pairs, choose an epoch by scores, and compare it with the source-only model."""
    optimisation = Optimisation(model, config, lr=config.lr, epochs=config.epochs, device=target.device)
    loop = Loop(run, "adaptation", model, optimisation, config=config, epochs=config.epochs)
    encode = Encoder(model, config, screen)
    watch = Watch(run, model, encode, holdout, config.select, loop.extras)
    last: dict[str, Tensor] = {}
    measures: list[Measure] = []
    try:
        encoded = train_on_pairs(run, loop, optimisation, watch, source, labels, target, config, screen, rearranged)
        last = {name: x.clone() for name, x in model.state_dict().items()}
    except Hopeless as error:
        before, measures = watch.before, [gave_up(str(error))]
        if before is None or not (config.guard or watch.selection.kept):
            raise
        if not watch.selection.kept:
            at_start = judge_source(before)
            return Adaptation(before, None, 0, last, at_start if objections(at_start) else measures)
    chosen = watch.selection.epoch
    with run.timed("verdict"):
        if chosen != config.epochs or not last:
            watch.selection.restore(model)
            encoded = encode(target, "target")
        encoded_source = encode(source, "source")
        before = watch.before
        after = impression(encoded_source, encoded, search(encoded_source, labels, encoded, config))
        assert before is not None, "the first round makes it"
        measures += judge_adapted(before, after, watch.scores(0), watch.scores(chosen))
    reached = config.epochs if last else chosen
    warning = fell_later(chosen, [watch.scores(epoch)["consensus"] for epoch in range(chosen, reached + 1)])
    return Adaptation(before, after, chosen, last, measures, warning)


def train_on_pairs(
    run: Run,
    loop: Loop,
    optimisation: Optimisation,
    watch: Watch,
    source: Images,
    labels: Tensor,
    target: Images,
    config: Config,
    screen: Screen,
    rearranged: Rearranged | None = None,
) -> Encoded:
    """The loop: pairs are searched anew every few epochs. Returns the target as the model sees it at the end."""
    model, encode = watch.encode.model, watch.encode
    report = StageReport(run, screen, loop, config)
    losses, names = stage_losses(model, config)
    pairs = Pairs(**loop.extras["pairs"]).to(target.device) if "pairs" in loop.extras else None
    train = Step(losses, optimisation, config.compile)
    encoded = encode(target, "target")
    if loop.epoch == 1 and loop.step == 0:
        watch.epoch(0, encoded)

    for epoch in loop.epochs():
        if loop.step == 0 and (epoch - 1) % config.rebuild_every == 0:
            encoded_source = encode(source, "source")
            found = find_pairs(run, epoch, encoded_source, labels, encoded, config, screen, rearranged)
            if epoch == 1:
                start_from(watch, impression(encoded_source, encoded, found), config)
            pairs = found.pairs()
            require_pairs(pairs, epoch)
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
        report.write(dict(zip(names, loop.mean_losses(), strict=True)), pairs=len(pairs))
        encoded = encode(target, "target")
        watch.epoch(epoch, encoded)
    return encoded


def stage_losses(model: Network, config: Config) -> tuple[Losses, tuple[str, ...]]:
    """The losses of a step, and what the log calls them."""
    if config.self_training != "none":
        return self_training_losses(model, config.self_training)
    terms = Terms(config.loss_source, config.loss_source_target, config.loss_target)

    def losses(x_s: Tensor, x_t: Tensor, y_s: Tensor, y_t: Tensor) -> tuple[Tensor, ...]:
        return adaptation_losses(
            three_branches(model, x_s, x_t, first_block_residual=config.first_block_residual),
            y_s,
            y_t,
            config.detach_teacher,
            terms,
        )

    return losses, terms.names()


def start_from(watch: Watch, before: Impression, config: Config) -> None:
    """Remember the source-only model; if adaptation from it is hopeless, say so before time is spent on it."""
    watch.remember(before)
    against = objections(judge_source(before))
    if against and config.guard:
        raise Hopeless(against[0].sentence)


def find_pairs(
    run: Run,
    epoch: int,
    source: Encoded,
    labels: Tensor,
    target: Encoded,
    config: Config,
    screen: Screen,
    rearranged: Rearranged | None = None,
) -> Search:
    """The pairs of the next epochs, by the model as it is now."""
    found = search(source, labels, target, config)
    if rearranged is not None:
        found = rearranged(found, source, target)
    elif config.self_training != "none":
        found = self_trained(found, target.logits, epoch, config)
    number = (epoch - 1) // config.rebuild_every + 1
    run.write_arrays(f"pairs/round-{number:02}.npz", found.arrays())
    summary = found.pairs().summary()
    accuracy = float((source.logits.argmax(dim=1) == labels).double().mean())
    run.log("pairs", round=number, epoch=epoch, **summary, **found.agreement(), source_accuracy=accuracy)
    screen.say(
        f"round {number}: {summary['kept']} of {summary['proposed']} pairs kept, using {summary['sources_used']} "
        f"source and {summary['targets_used']} target images of {summary['classes_used']} classes"
    )
    return found


def search(source: Encoded, labels: Tensor, target: Encoded, config: Config) -> Search:
    return search_pairs(
        source.features,
        labels,
        target.features,
        target.logits,
        center_aware=config.center_aware,
        mutual=config.mutual_pairs,
        pairing=config.pairing,
        target_class=config.target_class,
    )
