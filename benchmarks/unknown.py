"""Scores that find target images of classes that the source does not have: the area under the ROC curve, in percent.

    python benchmarks/unknown.py DATA --weights FILE [--features FOLDER]

DATA as for instant.py; open and open-partial splits as in classsets.py. Half of the target's images, drawn at random,
are the run's; the other half is new: it is scored with what a run keeps (the features and the scores of 1,000 of its
target images). Then the halves change places. Each score tells the images of absent classes from the others: 50 is
guessing. Printed: means over tasks and halves."""

from collections import defaultdict

import numpy as np
import torch
from classsets import Task, print_table, tasks
from sklearn.metrics import roc_auc_score
from tasks import encoded_domains, feature_parser
from torch import Tensor
from torch.nn import functional as F

from cdtrans.network.encoding import Encoded
from cdtrans.pairing.graphs import LOOSE, Start, Statistics, fit_probe
from cdtrans.pairing.neighbours import unit_rows
from cdtrans.pairing.occurring import KEPT, nearness, no_class_score, score_of_nearest, standard
from cdtrans.pairing.pairs import Domains
from cdtrans.trust.support import DRAWN, evenly

KINDS = ("open", "open-partial")


def main() -> None:
    arguments = feature_parser(__doc__).parse_args()
    domains = encoded_domains(arguments.data, arguments)
    table: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for kind in KINDS:
        for name, task in tasks(domains, kind):
            order = torch.from_numpy(np.random.default_rng(0).permutation(len(task.truth)))
            halves = [rows.sort().values for rows in order.tensor_split(2)]
            both = [areas_of(task, *halves), areas_of(task, *halves[::-1])]
            areas = {score: float(np.mean([each[score] for each in both])) for score in both[0]}
            for score, area in areas.items():
                table[score][kind].append(area)
            print(kind, name, *(f"{score} {area:.1f}" for score, area in areas.items()), sep="; ", flush=True)
    print_table(table)


def areas_of(task: Task, run: Tensor, new: Tensor) -> dict[str, float]:
    """By score, for the rows of the target that are the run's and those that are new."""
    source, labels, target = task.domains.source, task.domains.source_labels, task.domains.target.features
    known = Domains(source, labels, Encoded(target[run], target[:0]))
    smooth = no_class_score(Start.of(known, classes=task.classes, leading=task.leading))
    (doubt, plain), (new_doubt, new_plain) = plain_scores(known, target[new], task)
    sample = evenly(target[run], DRAWN)
    nearest = score_of_nearest(target[new], target[run][sample], smooth[sample])
    found = {
        "run: 1 - largest probability, source-only": (run, doubt),
        "run: not smoothed": (run, plain),
        "run: no_class": (run, smooth),
        "new: 1 - largest probability, source-only": (new, new_doubt),
        "new: not smoothed (A)": (new, new_plain),
        "new: nearest images of the run (B)": (new, nearest),
        "new: 0.2 A + 0.8 B": (new, (1 - KEPT) * new_plain + KEPT * nearest),
        "new: no_class": (new, (1 - KEPT) * relative(new_doubt, doubt) + KEPT * nearest),
    }
    absent = task.truth == task.classes
    return {name: 100 * roc_auc_score(absent[rows].numpy(), score.numpy()) for name, (rows, score) in found.items()}


def plain_scores(run: Domains, new: Tensor, task: Task) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """For the run's images and for new ones: 1 less the source-only model's largest probability, and the sum of the
    terms of `no_class_score` without graphs."""
    of_source = Statistics.of(run.source.features)
    of_target = Statistics.of(run.target.features, prior=of_source)
    x = of_source.standardised(run.source.features)
    both = [of_target.standardised(features) for features in (run.target.features, new)]
    y = F.one_hot(run.source_labels, task.classes).to(x)
    probes = [(end, fit_probe(x[:, :end], y, LOOSE)) for end in (task.leading, x.shape[1])]
    source, *units = (unit_rows(z[:, : task.leading]) for z in (x, *both))
    means = unit_rows(y.T @ source)
    doubts, terms = [], []
    for z, unit in zip(both, units, strict=True):
        p = [probe.probabilities(z[:, :end]) for end, probe in probes]
        gap = nearness(unit, units[0], itself=z is both[0]) - nearness(unit, source, itself=False)
        doubts.append(1 - p[-1].amax(dim=1))
        terms.append((1 - torch.stack(p).mean(dim=0).amax(dim=1), -(unit @ means.T).amax(dim=1), gap))
    plain, new_plain = (
        torch.stack([relative(term, of_run) for term, of_run in zip(each, terms[0], strict=True)]).sum(dim=0)
        for each in terms
    )
    return (doubts[0], standard(plain)), (doubts[1], relative(new_plain, plain))


def relative(score: Tensor, of_run: Tensor) -> Tensor:
    """In standard deviations from the mean of the run's images."""
    return (score - of_run.mean()) / (of_run.std(correction=0) + 1e-9)


if __name__ == "__main__":
    main()
