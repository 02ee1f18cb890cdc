"""Scores that find target images of classes that the source does not have: the area under the ROC curve, in percent.

    python benchmarks/unknown.py DATA --weights FILE [--features FOLDER] [--splits 5] [--known 0.5]

DATA as for instant.py. For each task and split, a random half of the classes is taken away from the source, the frozen
backbone is adapted (`--effort instant`) to the whole target, and each score tells its images of absent classes from the
others: 50 is guessing. Printed: mean, lowest, and how many tasks (means over the splits) are over 65."""

import itertools

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from tasks import class_count, encoded_domains, feature_parser, served_logits
from torch import Tensor
from torch.nn import functional as F

from cdtrans.pairing.graphs import LOOSE, Statistics, fit_probe
from cdtrans.pairing.neighbours import unit_rows

TEMPERATURES = ((1.0, 1.0), (2.0, 2.0), (2.0, 1.0), (1.0, 2.0))  # adapted and source-only model


def main() -> None:
    parser = feature_parser(__doc__)
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--known", type=float, default=0.5, help="share of the classes that the source has")
    arguments = parser.parse_args()
    domains = encoded_domains(arguments.data, arguments)
    classes = class_count(domains)

    found: dict[str, list[list[float]]] = {}  # by score: the areas of each task's splits
    for source, target in itertools.permutations(domains, 2):
        (x, y, leading), (z, answers, _) = domains[source], domains[target]
        areas: dict[str, list[float]] = {}
        for split in range(arguments.splits):
            order = torch.from_numpy(np.random.default_rng(split).permutation(classes))
            known = order[: round(arguments.known * classes)].sort().values
            rows = torch.isin(y, known)
            absent = (~torch.isin(answers, known)).numpy()
            for name, score in scores(x[rows], torch.searchsorted(known, y[rows]), z, len(known), leading).items():
                areas.setdefault(name, []).append(100 * roc_auc_score(absent, score.double().numpy()))
        for name, values in areas.items():
            found.setdefault(name, []).append(values)
        print(f"{source} > {target}", *(f"{np.mean(values):.1f}" for values in areas.values()), flush=True)
    for name, tasks in found.items():
        over = sum(np.mean(values) > 65 for values in tasks)
        print(f"{np.mean(tasks):5.1f} {np.min(tasks):5.1f} {over:3} of {len(tasks)}  {name}")


def scores(x: Tensor, y: Tensor, z: Tensor, classes: int, leading: int) -> dict[str, Tensor]:
    """Scores of every target image, [Nt] each; high where no class fits."""
    of_source = Statistics.of(x)
    s, t = of_source.standardised(x), Statistics.of(z, prior=of_source).standardised(z)
    probe = fit_probe(s, F.one_hot(y, classes).to(s), LOOSE)
    adapted, source_only = served_logits(x, y, z, classes, leading), t @ probe.weight + probe.bias
    label = adapted.argmax(dim=1)
    found = of_one(adapted, "adapted") | of_one(source_only, "source-only")
    found |= distances(torch.cat([s, t]), torch.cat([y, label]), t, "adapted") | distances(s, y, t, "source-only")
    for a, b in TEMPERATURES:
        p, q = (adapted / a).softmax(dim=1), (source_only / b).softmax(dim=1)
        found |= {
            f"both, temperatures {a:g} and {b:g}: 1 - source-only probability of the predicted class": (
                1 - q.gather(1, label[:, None]).squeeze(1)
            ),
            f"both, temperatures {a:g} and {b:g}: distance of the probabilities": (p - q).abs().sum(dim=1) / 2,
            f"both, temperatures {a:g} and {b:g}: 1 - sum of their products": 1 - (p * q).sum(dim=1),
            f"both, temperatures {a:g} and {b:g}: 1 - product of their largest": 1 - p.amax(dim=1) * q.amax(dim=1),
        }
    return found


def of_one(logits: Tensor, model: str) -> dict[str, Tensor]:
    found = {f"{model}: - largest logit": -logits.amax(dim=1)}
    for temperature in (1.0, 4.0):
        x = logits / temperature
        p = x.softmax(dim=1)
        found |= {
            f"{model}, temperature {temperature:g}: 1 - largest probability": 1 - p.amax(dim=1),
            f"{model}, temperature {temperature:g}: entropy": torch.special.entr(p).sum(dim=1),
            f"{model}, temperature {temperature:g}: energy (- logsumexp)": -x.logsumexp(dim=1),
        }
    return found


def distances(x: Tensor, y: Tensor, queries: Tensor, model: str) -> dict[str, Tensor]:
    """To the nearest class mean of the features that the model was fitted to, which would have to be stored."""
    means = torch.stack([x[y == k].mean(dim=0) for k in range(int(y.max()) + 1)])
    return {
        f"{model}: distance to the nearest class mean": torch.cdist(queries, means).amin(dim=1),
        f"{model}: cosine distance to it": 1 - (unit_rows(queries) @ unit_rows(means).T).amax(dim=1),
    }


if __name__ == "__main__":
    main()
