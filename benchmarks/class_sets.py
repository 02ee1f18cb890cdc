"""Does `check` see that a target has few of the classes, or classes that the source lacks? docs/results/check.md.

    python benchmarks/class_sets.py DATA ... --weights FILE [--features DIR]

For every task of each data set: the target as it is, made imbalanced 10:1, with few of its classes, and with a source
that lacks half of them. Prints the area under the ROC curve of each sign, the target as it is against the spoilt ones,
and one made imbalanced against one of few classes."""

import itertools
from collections import defaultdict

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from tasks import encoded_domains, feature_parser, thinned

from cdtrans.pairing.occurring import absent_classes, unsteady
from cdtrans.trust.probes import _standardised, target_start

DRAWS = 3  # random class sets for each task


def signs(x: np.ndarray, labels: np.ndarray, y: np.ndarray, leading: int) -> dict[str, float]:
    names, labels = np.unique(labels, return_inverse=True)
    start = target_start(x, labels, y, leading)
    x, y = _standardised(x), _standardised(y)
    a, b = (z / np.linalg.norm(z, axis=1, keepdims=True) for z in (x, y))
    similar, own = b @ a.T, b @ b.T
    to_source, nearest = similar.max(axis=1), labels[similar.argmax(axis=1)]
    np.fill_diagonal(own, -1)
    shares = [np.bincount(z, minlength=len(names)) / len(z) for z in (labels, nearest)]
    return {
        "the row of check warns": float(absent_classes(start) is not None),
        "scattered classes (the row of check)": float(unsteady(start, start.probe).double().mean()),
        "class shares by the nearest source images": float(np.abs(shares[1] - shares[0]).sum() / 2),
        "far from the source": -float(to_source.mean()),
        "nearer to itself than to the source": float((own.max(axis=1) - to_source).mean()),
    }


def main() -> None:
    arguments = feature_parser(__doc__, "+").parse_args()
    print("| data | sign | few classes | few against 10:1 | classes the source lacks |\n|---|---|---|---|---|")
    for data in arguments.data:
        domains = encoded_domains(data, arguments)
        found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for source, target in itertools.permutations(domains, 2):
            (x, labels, leading), (y, answers, _) = domains[source], domains[target]
            classes = int(labels.max()) + 1
            for kind, rows, columns in conditions(labels, answers, classes):
                for sign, value in signs(x[rows].numpy(), labels[rows].numpy(), y[columns].numpy(), leading).items():
                    found[sign][kind].append(value)
        for sign, values in found.items():
            pairs = (("healthy", "few"), ("imbalanced", "few"), ("healthy", "more"))
            cells = [f"{area(values[a], values[b]):.2f}" for a, b in pairs]
            if "warns" in sign:  # in how many tasks, as they are too
                kinds = ("few", "imbalanced", "more", "healthy")
                few, *others = (f"{sum(values[kind]):.0f} of {len(values[kind])}" for kind in kinds)
                cells = [few, f"10:1: {others[0]}", f"{others[1]}; as it is: {others[2]}"]
            print(f"| {data.name} | {sign} | {' | '.join(cells)} |", flush=True)


def conditions(labels: torch.Tensor, answers: torch.Tensor, classes: int):  # type: ignore[no-untyped-def]
    """Kind, rows of the source, rows of the target."""
    everything = torch.arange(len(labels)), torch.arange(len(answers))
    yield "healthy", *everything
    for draw in range(DRAWS):
        order = torch.from_numpy(np.random.default_rng(draw).permutation(classes))
        yield "imbalanced", everything[0], thinned(answers, 10, draw)
        yield "few", everything[0], torch.isin(answers, order[: max(2, classes // 6)]).nonzero().squeeze(1)
        yield "more", torch.isin(labels, order[: -(-classes // 2)]).nonzero().squeeze(1), everything[1]


def area(healthy: list[float], spoilt: list[float]) -> float:
    return float(roc_auc_score([0] * len(healthy) + [1] * len(spoilt), healthy + spoilt))


if __name__ == "__main__":
    main()
