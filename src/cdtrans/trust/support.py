"""Do the source's labels support a model's predictions for the target?

Every target image has nearest source images in the features of the pretrained backbone, each domain standardised by its
own statistics. Nothing in a run touches these features, so the labels of these images are evidence that no training can
flatter. (Features that were trained on the source agree with themselves: with them the accuracy of a weak model was
estimated 15 points too high. They are used where there are no pretrained weights.)

    support   agreement of the predictions with the nearest images' labels, beyond chance (Cohen's kappa), relative to
              the accuracy of a probe on source images that it has not seen: what such features can know at all
    shift     total variation between the class shares of the predictions and those of the source

The reference labels are those that a probe and neighbour graphs give to the target in the same features
(pairing.graphs), whatever method is trained. The estimate compares a model with them.

Where a target has other classes than the source, or noise instead of images, support is low; where it has only few of
the classes, shares are shifted. A wide gap between the domains looks the same, so low support proves no harm; only
predictions without any support do."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from cdtrans.network.encoding import Encoded
from cdtrans.pairing.graphs import LOOSE, TILE, Start, Statistics, fit_probe, label_from, nearest_keys
from cdtrans.pairing.narrowing import Numbering
from cdtrans.pairing.neighbours import unit_rows
from cdtrans.pairing.occurring import (
    absent_classes,
    candidates,
    no_class_score,
    score_of_nearest,
    standard,
    strangeness,
)
from cdtrans.pairing.pairs import Domains
from cdtrans.record.outcome import Support

NEIGHBOURS = 10
MOST_IMAGES = 20_000  # most images of a domain that are compared or probed, evenly spread
FOLDS = 5  # cross-validation
AGREES = 0.87  # share of equal labels; below it the ranges of the digits were wrong (docs/results/estimate.md)
DRAWN = 1000  # images of each domain whose features are kept for the report's maps


@dataclass(frozen=True)
class Impression:
    """One model, the source it was trained on and the target. Tensors on the CPU, half precision where enough."""

    target_logits: Tensor  # [Nt, K]
    source_labels: Tensor  # [Ns]
    source_predicted: Tensor  # [Ns]
    source_confidence: Tensor  # [Ns]
    source_own: Tensor  # [Ns] the probability of the image's own label
    source_sample: Tensor  # [S, D] features
    target_sample: Tensor  # [T, D] features

    @property
    def has_source(self) -> bool:
        """Whether there were source images."""
        return len(self.source_labels) > 0

    @property
    def predicted(self) -> Tensor:
        return self.target_logits.argmax(dim=1)

    @property
    def source_accuracy(self) -> float:
        """On the images it was trained on, in eval mode."""
        return float((self.source_predicted == self.source_labels).double().mean())


def impression(domains: Domains) -> Impression:
    source, target, labels = domains.source, domains.target, domains.source_labels
    p = source.logits.softmax(dim=1)
    confidence, predicted = p.max(dim=1)
    own = p.gather(1, labels[:, None]).squeeze(1)
    samples = [x.features[evenly(x.features, DRAWN)].half() for x in (source, target)]
    columns = (target.logits, labels, predicted, confidence.half(), own.half(), *samples)
    return Impression(*(x.cpu() for x in columns))


def evenly(features: Tensor, most: int) -> Tensor:
    """The rows of at most so many images, evenly spread over a domain, so that every class of the source is in them."""
    count = len(features)
    return torch.linspace(0, count - 1, min(count, most)).round().long().to(features.device)


def views(before: Impression, after: Impression, evidence: "Evidence", numbering: Numbering) -> dict[str, np.ndarray]:
    """views.npz: both models' view of the images, for the report; the target's confidences come from the logits. A
    source image of a class that does not occur was not looked at: it counts as surely right."""
    labels = numbering.source_labels.numpy()
    half = {
        "before_source": before.source_sample,
        "before_target": before.target_sample,
        "after_source": after.source_sample,
        "after_target": after.target_sample,
        "doubt": evidence.doubt,
    }
    whole = {
        "sampled_source": numbering.source[evenly(before.source_labels, DRAWN)],
        "sampled_target": evenly(before.target_logits, DRAWN),
        "target_before": numbering.classes[before.predicted],
        "target_after": numbering.classes[after.predicted],
        "source_labels": numbering.source_labels,
        "candidates": evidence.candidates,
    }
    predicted = numbering.classes[before.source_predicted].numpy().astype(np.int32)
    certain = np.ones(len(labels), np.float16)
    of_source = {
        "source_predicted": numbering.per_image(predicted, labels),
        "source_confidence": numbering.per_image(before.source_confidence.numpy(), certain),
        "source_own": numbering.per_image(before.source_own.numpy(), certain),
    }
    arrays = {name: x.numpy().astype(np.float16) for name, x in half.items()} | {"no_class": evidence.no_class.numpy()}
    return arrays | {name: x.numpy().astype(np.int32) for name, x in whole.items()} | of_source


class Evidence(NamedTuple):
    """Evidence from fixed features of both domains."""

    nearest: Tensor  # [n, k] labels of the source images nearest to some target images
    source_labels: Tensor  # [Ns]
    learnable: Tensor  # [] accuracy of a linear probe on the source, cross-validated
    reference: Tensor  # [n] labels of these target images by the graphs
    agreement: Tensor  # [] share of equal labels in the reference and the graphs' first probe
    steady: Tensor  # [] share of an image's neighbours in the target with the same reference label
    occurs: Tensor  # [K] bool, the source's classes that occur in the target; labels are numbered among these
    noticed: Tensor  # [] bool, whether that some do not was noticed here, and not told
    no_class: Tensor  # [Nt] the higher, the less a target image is like any class
    candidates: Tensor  # [K, c] target images that are most likely of each class
    doubt: Tensor  # [K] the higher, the less clear it is whether a class occurs
    strange: Tensor  # [] how much less like any class the least fitting target images are than the source's
    pretrained: Tensor  # [] bool, whether nothing of the run has trained these features

    @classmethod
    def of(
        cls,
        domains: Domains,
        classes: int,
        leading: int,
        *,
        pretrained: bool,
        told: Tensor | None = None,
        notice: bool = False,
    ) -> "Evidence":
        """The first `leading` features belong to the last two blocks. `told`: the classes that occur, [K] bool, as a
        person said; otherwise those that do not are noticed or not."""
        labels, none = domains.source_labels, torch.tensor(0.0)
        every, of_backbone = torch.ones(classes, dtype=torch.bool), torch.tensor(pretrained)
        if not len(labels):  # a run without source images
            no_images = torch.zeros(classes, 0, dtype=torch.long)
            occurs = every if told is None else told
            doubts = 1 - domains.target.logits[:, occurs].softmax(dim=1).amax(dim=1)
            nothing = (occurs, none > 0, standard(doubts).cpu(), no_images, torch.zeros(classes), none)
            return cls(labels[:, None].cpu(), labels.cpu(), none, labels.cpu(), none, none, *nothing, of_backbone)
        learnable = torch.tensor(cross_validated(domains.source.features, labels, classes))
        some = some_of(domains)
        start = Start.of(some, classes=classes, leading=leading)
        shown, doubt = candidates(start)
        shown = evenly(domains.target.features, MOST_IMAGES)[shown]
        absent = absent_classes(start) if told is None and notice else None
        occurs = (every.to(labels.device) if absent is None else ~absent) if told is None else told.to(labels.device)
        kept = occurs[labels]
        start = start if bool(occurs.all()) else start.only(occurs)
        graphs = label_from(start, None)
        reference = graphs.probabilities.argmax(dim=1)
        agreement = (reference == graphs.first).double().mean().cpu()
        number = occurs.cumsum(0) - 1
        nearest = number[nearest_labels(domains, kept)].cpu()
        scores = of_every_image(no_class_score(start), domains.target.features).float().cpu()
        noticed, strange = torch.tensor(absent is not None), strangeness(start).cpu()
        about = (occurs.cpu(), noticed, scores, shown.cpu(), doubt.cpu(), strange)
        own = number[labels[kept]].cpu()
        return cls(nearest, own, learnable, reference.cpu(), agreement, graphs.steady, *about, of_backbone)

    def support(self, predicted: Tensor) -> Support:
        """The support of a model's predictions, [Nt]."""
        some = predicted[evenly(predicted, MOST_IMAGES)]
        each = torch.tensor([kappa(some, labels) for labels in self.nearest.T]) / max(float(self.learnable), 0.1)
        return Support(float(each[0]), float(each.mean()), shifted(predicted, self.source_labels))

    def agrees(self, predicted: Tensor) -> bool:
        """Whether a model's predictions [Nt] follow the reference, so that what is known of one holds for the other."""
        same = predicted[evenly(predicted, MOST_IMAGES)] == self.reference
        return float(same.double().mean()) >= AGREES

    def stayed(self, predicted: Tensor, source_only: Tensor) -> float:
        """Share of a model's predictions [Nt] that are still the source-only model's, and not the reference's."""
        rows = evenly(predicted, MOST_IMAGES)
        still = (predicted == source_only)[rows] & (predicted[rows] != self.reference)
        return float(still.double().mean())


def of_every_image(scores: Tensor, features: Tensor) -> Tensor:
    """[n] scores of some images, evenly spread -> [Nt]: the others have those of the nearest ones."""
    some = evenly(features, MOST_IMAGES)
    if len(some) == len(features):
        return scores
    return score_of_nearest(features, features[some], scores).index_copy(0, some, scores)


def nearest_labels(domains: Domains, kept: Tensor) -> Tensor:
    """[n, k] labels of the source images nearest to each of n target images, among those `kept`, [Ns] bool."""
    source, target = domains.source.features, domains.target.features
    of_source = Statistics.of(source)
    some = target[evenly(target, MOST_IMAGES)]
    queries = unit_rows(Statistics.of(target, prior=of_source).standardised(some))
    keys = unit_rows(of_source.standardised(source))[kept]
    k = min(NEIGHBOURS, len(keys))
    indices = [nearest_keys(part, keys, -len(part), k)[1] for part in queries.split(TILE)]  # no key is the query itself
    return domains.source_labels[kept][torch.cat(indices)]


def some_of(domains: Domains) -> Domains:
    """Both domains, reduced to images that are evenly spread, and without labels of target images."""
    x, y = (evenly(side.features, MOST_IMAGES) for side in (domains.source, domains.target))
    source, target = (Encoded(*(z[rows] for z in side)) for side, rows in ((domains.source, x), (domains.target, y)))
    return Domains(source, domains.source_labels[x], target)


def kappa(a: Tensor, b: Tensor) -> float:
    """Agreement of two labellings of the same images, from chance (0) to perfect (1)."""
    p, q = _shares(a, b)
    chance = float((p * q).sum())
    return (float((a == b).double().mean()) - chance) / max(1 - chance, 1e-9)


def shifted(a: Tensor, b: Tensor) -> float:
    """Total variation between the class shares of two labellings."""
    p, q = _shares(a, b)
    return float((p - q).abs().sum() / 2)


def _shares(*labels: Tensor) -> list[Tensor]:
    classes = 1 + max(int(x.max()) for x in labels)
    return [torch.bincount(x, minlength=classes).double() / len(x) for x in labels]


def cross_validated(features: Tensor, labels: Tensor, classes: int) -> float:
    """Accuracy of a linear probe on images that it has not seen: near chance if labels were mixed up, or if training
    has ruined the features, whatever the model's own head says."""
    some = evenly(labels, MOST_IMAGES)
    x, y = Statistics.of(features).standardised(features[some]), labels[some]
    fold = torch.arange(len(y), device=y.device) % FOLDS  # the source is in the order of its classes
    right = 0
    for n in range(FOLDS):
        kept, left = fold != n, fold == n
        if kept.any() and left.any():
            probe = fit_probe(x[kept], F.one_hot(y[kept], classes).to(x), LOOSE)
            right += int((probe.probabilities(x[left]).argmax(dim=1) == y[left]).sum())
    return right / len(y)
