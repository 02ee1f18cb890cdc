"""Stage 2, for every method: plan, train, repeat (docs/method.md). The only target labels here are those that the user
gave with --answers."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cdtrans.config import Config
from cdtrans.errors import Hopeless, counted
from cdtrans.inputs.batches import EpochBatches, Images, LabelledImages
from cdtrans.methods.base import Batch, Method, Round, Sizes, require_losses
from cdtrans.network.encoding import Encoded, Encoder, Frozen
from cdtrans.network.network import Network, Output
from cdtrans.pairing.narrowing import Numbering
from cdtrans.pairing.pairs import Domains, Pairs, Proposals, TargetLabels, require_pairs
from cdtrans.record.layout import ROUND
from cdtrans.record.outcome import Measure, Setback
from cdtrans.record.run import RunWriter
from cdtrans.record.wording import finding_sentence
from cdtrans.runtime.device import between_passes
from cdtrans.runtime.ranks import part, world
from cdtrans.runtime.screen import Screen
from cdtrans.schema import Misfit, build
from cdtrans.training.loop import Loop, Stateful, step_seed
from cdtrans.training.optimisation import Optimisation
from cdtrans.training.step import Memory, Step, Train
from cdtrans.trust.guard import fell_later, gave_up, judge_adapted, judge_source
from cdtrans.trust.selection import Watch
from cdtrans.trust.support import Evidence, Impression, impression

OF_SOURCE, OF_OTHERS = "source", "other source classes"  # names of passes over the source
PLANNING = -1  # the step number in the seed of a plan, so that it draws other numbers than the epoch's steps


class TrainingData(NamedTuple):
    """The data of stage 2: labelled source images, some of them held out, and target images."""

    source: Images
    labels: Tensor  # [Ns] of the source
    target: Images
    holdout: LabelledImages | None
    given: TargetLabels | None = None  # labels of --answers
    occurs: Tensor | None = None  # [K] bool, the classes that occur in the target as a person said
    beside: Images | None = None  # source images of the others

    def sizes(self, classes: int) -> Sizes:
        return Sizes(classes, len(self.source), len(self.target))

    def narrowed(self, numbering: Numbering, frozen: Frozen | None) -> "TrainingData":
        """The data of stage 2, from that of stage 1: only classes that occur, in their new numbers. So are the
        features that stage 1 has computed, unless several ranks share them."""
        if numbering.whole:
            return self
        features = frozen.pop(OF_SOURCE, None) if frozen else None
        if frozen is not None and features is not None and world() == 1:
            frozen |= {OF_SOURCE: features[numbering.source], OF_OTHERS: features[numbering.beside]}
        holdout, given = self.holdout, self.given
        if holdout:
            kept = torch.isin(holdout.labels.cpu(), numbering.classes)
            rows = kept.nonzero().squeeze(1)
            labels = numbering.new_labels(holdout.labels[kept.to(holdout.labels.device)])
            holdout = LabelledImages(holdout.images.part(rows), labels) if len(rows) else None
        return self._replace(
            source=self.source.part(numbering.source),
            labels=numbering.new_labels(self.labels[numbering.source.to(self.labels.device)]),
            holdout=holdout,
            given=given and given._replace(labels=numbering.new_labels(given.labels)),
            beside=self.source.part(numbering.beside),
        )


class Adaptation(NamedTuple):
    """The result of stage 2."""

    network: Network  # the served network, with the weights of the chosen epoch
    before: Impression  # the source-only model
    after: Impression | None  # the chosen epoch; None if there is none
    chosen_epoch: int
    last: dict[str, Tensor]  # the last epoch's weights; empty if training broke off
    evidence: Evidence  # the guard's, from fixed features of both domains
    numbering: Numbering  # numbers of the classes and source images that stage 2 knows
    measures: list[Measure]  # evidence for or against the adapted model
    setback: Setback | None = None  # after the chosen epoch


def adapt_to_target(
    run: RunWriter,
    method: Method,
    data: TrainingData,
    evidence: Evidence,
    numbering: Numbering,
    config: Config,
    screen: Screen,
    frozen: Frozen | None = None,
) -> Adaptation:
    """Train by the method, choose an epoch by label-free scores, and compare it with the source-only model. `data` has
    the classes of `numbering`. `frozen` holds features that stage 1 has computed, if it has not trained the
    backbone."""
    network = method.served()
    encode = Encoder(network, config, screen, frozen)
    watch = Watch(run, encode, data.holdout, config.select, numbering)
    last: dict[str, Tensor] = {}
    measures: list[Measure] = []
    try:
        encoded = train(run, method, data, evidence, watch, config, screen)
        last = {name: x.clone() for name, x in network.state_dict().items()}
    except Hopeless as error:
        measures = [gave_up(error)]
        if watch.before is None or not (config.guard or watch.best):
            raise
    before, best = watch.before, watch.best
    assert before is not None, "the first round makes it"
    if best is None:  # training broke off in its first epoch
        at_start = judge_source(before, evidence)
        against = at_start if any(measure.harm for measure in at_start) else measures
        return Adaptation(network, before, None, 0, last, evidence, numbering, against)
    with run.timed("verdict"):
        if best.epoch != config.epochs or not last:
            network.load_state_dict(best.weights)
            encoded = encode(data.target, "target")
        after = impression(encode_domains(encode, data, encoded))
        measures += judge_adapted(before, after, evidence)
    reached = config.epochs if last else best.epoch
    later = [watch.scores[epoch]["consensus"] for epoch in range(best.epoch, reached + 1)]
    return Adaptation(network, before, after, best.epoch, last, evidence, numbering, measures, fell_later(later))


def train(
    run: RunWriter, method: Method, data: TrainingData, evidence: Evidence, watch: Watch, config: Config, screen: Screen
) -> Encoded:
    """The loop: a plan every few epochs. Returns the target as the served network encodes it at the end."""
    epochs, device = config.epochs, data.target.device
    optimisation = Optimisation(
        method, config, lr=config.lr, epochs=epochs, device=device, rates=method.rates(), network=method.network
    )
    planner, memory = Planner(run, method, watch.numbering, config, screen), Memory(method, "pairs", screen)
    parts: dict[str, Stateful] = {"watch": watch, "planner": planner, "memory": memory}
    loop = Loop(run, "adaptation", method, optimisation, screen, config=config, epochs=epochs, parts=parts)
    train_on = training_step(method, optimisation)
    step = Step(train_on, optimisation, memory, config.compile, capturable=method.capturable)
    progress = torch.zeros((), device=device)
    encode = watch.encode
    if not loop.fresh and method.trains:
        encode.thaw()
    elif loop.fresh and encode.model is not method.network:  # the served one is untrained: it cannot plan a round
        encode = Encoder(method.network, config, screen, encode.frozen)
    encoded = encode(data.target, "target")
    if loop.fresh:
        watch.epoch(0, encoded, encode)

    with loop.kept():
        for epoch in loop.epochs():
            if loop.step == 0 and (epoch - 1) % config.rebuild_every == 0:
                domains = encode_domains(encode, data, encoded)
                proposals = planner.plan(epoch, domains)
                if epoch == 1:
                    start_from(watch, domains, evidence, config)
                if method.trains:
                    planner.adopt(proposals, epoch, device)
            pairs, encode = planner.pairs, watch.encode
            if pairs is not None:  # otherwise `plan` has done everything
                encode.thaw()
                batches = PairBatches(pairs, data, config, epoch, progress)
                note = counted(len(pairs), "pair")
                loop.train(step, batches, images=2 * batches.size, note=note, pairs=len(pairs))
            encoded = encode(data.target, "target")
            watch.epoch(epoch, encoded)
    return encoded


@torch.no_grad()
def encode_domains(encode: Encoder, data: TrainingData, target: Encoded) -> Domains:
    """The source as the network sees it now, and the target. A run may have no source images."""
    if not len(data.source):
        return Domains(Encoded(target.features[:0], target.logits[:0]), data.labels, target)
    source = encode(data.source, OF_SOURCE)
    if data.beside is None:
        source = Encoded(*encode.model.head.of_another_domain(Output(*source)))
        return Domains(source, data.labels, target, data.given)
    both = [torch.cat(x) for x in zip(source, encode(data.beside, OF_OTHERS), strict=True)]
    features, logits = encode.model.head.of_another_domain(Output(*both))
    count = len(data.source)
    return Domains(Encoded(features[:count], logits[:count]), data.labels, target, data.given, features[count:])


def training_step(method: Method, optimisation: Optimisation) -> Train:
    """A method's step as a function of tensors."""

    def step(*inputs: Tensor) -> dict[str, Tensor]:
        batch, progress = Batch(*inputs[:-1]), inputs[-1]
        losses = method.train_step(batch, progress, optimisation.update)
        require_losses(method.train_step, losses, to_minimise=False)
        with torch.no_grad():
            method.after_step(batch, progress)
        return losses

    return step


class PairBatches:
    """The inputs of an epoch's steps: all pairs in random order, in whole batches, and the progress of training."""

    def __init__(self, pairs: Pairs, data: TrainingData, config: Config, epoch: int, progress: Tensor) -> None:
        """`progress`, t / T, is on the device, so that a captured step reads the current value."""
        self.progress, self.epoch, self.epochs = progress, epoch, config.epochs
        self.size = min(config.batch_size, len(pairs))
        count = len(pairs) // self.size
        self.slices = [slice(i * self.size, (i + 1) * self.size) for i in range(count)]
        generator = torch.Generator().manual_seed(step_seed(config.seed, "adaptation", epoch, 0))
        order_s = self._order(pairs, generator)  # [P]
        order_t = order_s if pairs.coupled else self._order(pairs, generator)
        mine = [part(batch) for batch in self.slices]
        self.x_s: EpochBatches | list[Tensor] = [data.target.none()] * count
        if len(data.source):
            self.x_s = data.source.plan(pairs.source[order_s], mine, config.flip, generator)
        else:
            data.target.draw(len(order_s), config.flip, generator)  # so that the target's draws do not change
        self.x_t = data.target.plan(pairs.target[order_t], mine, config.flip, generator)
        self.y_s, self.y_t = pairs.source_labels[order_s], pairs.target_labels[order_t]  # [P]
        self.i_t, self.weight = pairs.target[order_t], pairs.weight[order_t]  # [P]

    def _order(self, pairs: Pairs, generator: torch.Generator) -> Tensor:
        return torch.randperm(len(pairs), generator=generator)[: len(self) * self.size].to(pairs.source.device)

    def __len__(self) -> int:
        return len(self.slices)

    def __getitem__(self, step: int) -> tuple[Tensor, ...]:
        rows = self.slices[step]
        self.progress.fill_((self.epoch - 1 + step / len(self)) / self.epochs)
        x_s, x_t, i_t, weight = self.x_s[step], self.x_t[step], self.i_t[rows], self.weight[rows]
        return *Batch(x_s, self.y_s[rows], x_t, self.y_t[rows], i_t, weight), self.progress


def start_from(watch: Watch, domains: Domains, evidence: Evidence, config: Config) -> None:
    """Record the source-only model's impression. If adapting it is hopeless, stop before time is spent on it."""
    watch.before = impression(domains)
    against = [x for x in judge_source(watch.before, evidence) if x.harm and x.decisive]
    if against and config.guard:
        raise Hopeless(finding_sentence(against[0]), "See the guard's findings.")


class Planner:
    """Owns the pairs of a round: asks the method for them at the start of the round and records them."""

    def __init__(self, run: RunWriter, method: Method, numbering: Numbering, config: Config, screen: Screen) -> None:
        self.run, self.method, self.numbering, self.config, self.screen = run, method, numbering, config, screen
        self.pairs: Pairs | None = None

    def plan(self, epoch: int, domains: Domains) -> Proposals:
        every = self.config.rebuild_every
        round = Round((epoch - 1) // every + 1, -(-self.config.epochs // every), epoch)
        generator = torch.Generator().manual_seed(step_seed(self.config.seed, "adaptation", epoch, PLANNING))
        device = next(self.method.parameters()).device
        self.screen.begin("planning")
        self.method.to(between_passes(device))  # where the encoded images are
        proposals = self.method.plan(domains, round, generator)
        self.method.to(device)
        self.run.write(ROUND.numbered(round.number), self.numbering.pairs(proposals.arrays()))
        summary = proposals.pairs().summary()
        numbers = {"round": round.number, "epoch": epoch}
        self.run.log("pairs", **numbers, **summary, **domains.agreement())
        self.screen.say(
            f"round {round.number}: {summary['kept']} of {summary['proposed']} pairs kept, using "
            f"{summary['sources_used']} source and {summary['targets_used']} target images of "
            f"{summary['classes_used']} classes"
        )
        return proposals

    def adopt(self, proposals: Proposals, epoch: int, device: torch.device) -> None:
        """Use the kept pairs for training from now on."""
        pairs = proposals.pairs()
        require_pairs(pairs, epoch)
        self.pairs = pairs.to(device)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.pairs is None else self.pairs.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            pairs = build(Pairs, state, "pairs")
            for x in (pairs.source, pairs.target, pairs.source_labels):
                if x.dtype != torch.long or x.shape != pairs.weight.shape:
                    raise Misfit("kind", "pairs", "'pairs' must be indices of one length")
            self.pairs = pairs.to(next(self.method.parameters()).device)
