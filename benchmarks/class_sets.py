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

from cdtrans.trust.probes import _nearest_labels, _standardised, class_shares

DRAWS = 3  # random class sets for each task


def signs(x: np.ndarray, labels: np.ndarray, y: np.ndarray) -> dict[str, float]:
    x, y = _standardised(x), _standardised(y)
    nearest = _nearest_labels(x, labels, y)
    names = [str(k) for k in np.unique(labels)]
    a, b = (z / np.linalg.norm(z, axis=1, keepdims=True) for z in (x, y))
    to_source, own = (b @ a.T).max(axis=1), b @ b.T
    np.fill_diagonal(own, -1)
    return {
        "class shares (the row of check)": class_shares(nearest, labels, names).details["shift"],
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
            (x, labels, _), (y, answers, _) = domains[source], domains[target]
            classes = int(labels.max()) + 1
            for kind, rows, columns in conditions(labels, answers, classes):
                for sign, value in signs(x[rows].numpy(), labels[rows].numpy(), y[columns].numpy()).items():
                    found[sign][kind].append(value)
        for sign, values in found.items():
            pairs = (("healthy", "few"), ("imbalanced", "few"), ("healthy", "more"))
            cells = [f"{area(values[a], values[b]):.2f}" for a, b in pairs]
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
