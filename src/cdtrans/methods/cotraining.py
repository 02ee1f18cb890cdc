"""Co-training: the labels of neighbour graphs and a moving average of the network teach the network.

The start is that of `instant`: labels g of the target by graphs on the frozen features, and a classifier by ridge
regression on the source and g. Then, for source images x_s and target images x_t,

    q       the probabilities by a teacher, a moving average of the network, of the weakly augmented x_t
    t       (q + g) / 2, the label of x_t, with the weight w = max_k t_k; of an image that a person labelled, its label
    L_s     cross-entropy of the strongly augmented x_s with smoothed labels
    L_t     w times the cross-entropy of t and the prediction p for the strongly augmented, partly masked x_t
    L_i     mean entropy of p plus KL(mean of p || shares of g), weight 0.5: certain and varied, as g is

Every round makes new labels g by graphs on the teacher's features. Each domain standardises features by its own
statistics before the shared classifier; the teacher is served. Results: docs/results/recipe.md.

Pieces: masked consistency (Hoyer et al. 2023), information maximisation (Liang et al. 2020), label propagation (Zhou et
al. 2004), probe first, then fine-tune gently (Kumar et al. 2022)."""

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdtrans.inputs.batches import masked, strong
from cdtrans.methods.base import Batch, Method, Round, Sizes, follow
from cdtrans.methods.instant import probe_on_both, set_probe, set_statistics
from cdtrans.network.network import Head, Network
from cdtrans.pairing.graphs import label_target, relabel_target
from cdtrans.pairing.pairs import Domains, Proposals, shuffled
from cdtrans.runtime.ranks import gather
from cdtrans.schema import option

FULL_PAIRS = 19_200  # pairs of a whole run
FULL_IMAGES = 4_000  # with more images the pairs grow with the square root of their number
WINDOW = 1 / 3  # part of the run that the teacher averages
FASTEST, SLOWEST = 0.9, 0.999  # the teacher's decay


class CoTraining(Method):
    """Graph labels and a moving average as teachers."""

    @dataclass(frozen=True)
    class Options:
        length: float = option(1.0, "Training steps, relative to a full run.", minimum=0.01, maximum=100)
        graph: float = option(0.5, "Share of the graphs' labels in the target's.", minimum=0, maximum=1)
        target: float = option(1.0, "Weight of the target's loss.", minimum=0)
        information: float = option(0.5, "Weight of information maximisation.", minimum=0)
        mask: bool = option(True, "Mask parts of the target images.")
        strong: bool = option(True, "Strong augmentation of source and target images.")
        label_smoothing: float = option(0.1, "Label smoothing on the source.", minimum=0, maximum=0.99)
        head_rate: float = option(3.0, "Learning rate of the classifier, relative to --lr.", minimum=0)
        given: float = option(
            0.125, "Least share of images labelled by --answers among target images.", minimum=0, maximum=1
        )

    options: Options
    title = "The best recipe of this project, described in docs/results/recipe.md"
    takes_target_labels = True
    shares: Tensor
    first: Tensor
    given: Tensor
    steps: Tensor

    def __init__(self, network: Network, options: Options, sizes: Sizes) -> None:
        super().__init__(network, options, sizes)
        self.source_norm = nn.BatchNorm1d(network.dim, affine=False)
        self.head = Head(network.dim, sizes.classes, "standardise")
        self.teacher = Network(copy.deepcopy(network.backbone), copy.deepcopy(self.head), network.taps)
        self.teacher.requires_grad_(False)
        self.register_buffer("shares", torch.full((sizes.classes,), 1 / sizes.classes))  # class shares by the graphs
        self.register_buffer("first", torch.zeros(sizes.target_images, dtype=torch.long))  # see pairing.graphs
        self.register_buffer("given", torch.zeros(sizes.target_images, dtype=torch.bool))  # labelled by a person
        self.register_buffer("steps", torch.zeros(()))  # so far
        growth: float = max(1.0, (sizes.source_images + sizes.target_images) / FULL_IMAGES) ** 0.5
        self.pairs = math.ceil(options.length * FULL_PAIRS * growth)

    def served(self) -> Network:
        return self.teacher

    def train(self, mode: bool = True) -> "CoTraining":
        super().train(mode)
        self.teacher.eval()
        return self

    def rates(self) -> dict[str, float]:
        return {"head": self.options.head_rate}

    def plan(self, domains: Domains, round: Round, generator: torch.Generator) -> Proposals:
        leading = self.network.leading
        if round.number == 1:
            by_graphs = label_target(domains, classes=self.sizes.classes, leading=leading)
            self.first.copy_(by_graphs.first)
            labels = by_graphs.probabilities
            self.start(domains, labels)
        else:
            labels = relabel_target(domains, self.first, leading=leading)
        self.shares.copy_(labels.mean(dim=0))
        count = max(2, math.ceil(self.pairs / round.rounds))
        source, target = (
            shuffled(torch.arange(images), count, generator).to(labels.device)
            for images in (self.sizes.source_images, self.sizes.target_images)
        )
        if domains.given is not None:
            self.given[domains.given.images] = True
            often = int(self.options.given * count)
            target[:often] = shuffled(domains.given.images.cpu(), often, generator).to(target.device)
        return Proposals(source, target, domains.source_labels[source], labels[target], coupled=False)

    def start(self, domains: Domains, labels: Tensor) -> None:
        """The classifier and the statistics that the frozen features give."""
        probe, of_source, of_target = probe_on_both(domains, labels)
        set_probe(self.head, probe, of_target)
        set_statistics(self.source_norm, of_source)
        self.teacher.head.load_state_dict(self.head.state_dict())

    def losses(self, batch: Batch, progress: Tensor) -> dict[str, Tensor]:
        options = self.options
        with torch.no_grad():
            q = gather(self.teacher.encode(batch.x_t).logits.float()).softmax(dim=1)  # [B, K]
            graph = torch.where(self.given[batch.i_t], 1.0, options.graph)[:, None]
            t = q.lerp(batch.y_t.to(q), graph)
            weight = t.amax(dim=1)
            x_s, x_t = (strong(x) if options.strong else x for x in (batch.x_s, batch.x_t))
            x_t = masked(x_t) if options.mask else x_t
        f_s, f_t = (gather(x).float() for x in self.network.features_each(x_s, x_t))
        source = self.head.classifier(self.source_norm(f_s)).float()
        log_p = self.head.classify(f_t).logits.float().log_softmax(dim=1)
        return {
            "loss_source": F.cross_entropy(source, batch.y_s, label_smoothing=options.label_smoothing),
            "loss_target": -options.target * (weight * (t * log_p).sum(dim=1)).mean(),
            "loss_information": options.information * self.information(log_p),
        }

    def information(self, log_p: Tensor) -> Tensor:
        p = log_p.exp()
        mean = p.mean(dim=0)
        entropy = -(p * log_p).sum(dim=1).mean()
        return entropy + (mean * ((mean + 1e-6).log() - (self.shares + 1e-6).log())).sum()

    def after_step(self, batch: Batch, progress: Tensor) -> None:
        """The teacher follows, at once in the first steps and slowly then."""
        self.steps += 1
        decay = (self.steps / (9 + self.steps)).clamp(max=self.slowest(len(batch.y_s)))
        follow(self.teacher.backbone, self.network.backbone, 1 - decay)
        follow(self.teacher.head, self.head, 1 - decay)

    def slowest(self, batch: int) -> float:
        """The teacher's decay once it is an average of a third of the run's steps."""
        steps = self.pairs / batch
        return min(max(1 - 1 / max(1.0, WINDOW * steps), FASTEST), SLOWEST)
