"""The instant effort on every task of a data set, without a run folder for each: accuracy in percent.

    python benchmarks/instant.py DATA --weights FILE [--imbalance 10 --orders 2] [--each 5] [--few 2] [--pull 0]

DATA holds one folder of class folders for each domain (or DOMAIN/images). Each domain is encoded once. `--imbalance 10`
thins the target's classes out to 10:1, in that many random orders of the classes; `--source-imbalance` does it to the
source; `--each 5` keeps five source images of each class, `--few 2` two of the target's classes; `--pull 0` leaves
class shares as they are predicted."""

import itertools
import time

import numpy as np
import torch
from tasks import both_domains, class_count, encoded_domains, feature_parser, served_logits, thinned
from torch import Tensor

from cdtrans.config import read_recipe
from cdtrans.pairing import graphs


def first_of_each(labels: Tensor, each: int) -> Tensor:
    return torch.cat([(labels == k).nonzero().squeeze(1)[:each] for k in labels.unique()])


def main() -> None:
    parser = feature_parser(__doc__)
    parser.add_argument("--taps", type=int, default=read_recipe("best")["taps"])
    parser.add_argument("--imbalance", type=float, default=1)
    parser.add_argument("--source-imbalance", type=float, default=1)
    parser.add_argument("--orders", type=int, default=1)
    parser.add_argument("--each", type=int)
    parser.add_argument("--few", type=int)
    parser.add_argument("--pull", type=float, default=graphs.PULL)
    arguments = parser.parse_args()
    graphs.PULL = arguments.pull

    domains = encoded_domains(arguments.data, arguments, taps=arguments.taps)
    classes = class_count(domains)
    table = []
    for order in range(arguments.orders):
        for source, target in itertools.permutations(domains, 2):
            started = time.perf_counter()
            (x, y, leading), (z, answers, _) = domains[source], domains[target]
            if arguments.each:
                x, y = (part[first_of_each(domains[source][1], arguments.each)] for part in (x, y))
            if arguments.source_imbalance > 1:
                x, y = (part[thinned(domains[source][1], arguments.source_imbalance, 100 + order)] for part in (x, y))
            if arguments.imbalance > 1:
                z, answers = (part[thinned(domains[target][1], arguments.imbalance, order)] for part in (z, answers))
            if arguments.few:
                some = torch.from_numpy(np.random.default_rng(order).permutation(classes)[: arguments.few])
                z, answers = (part[torch.isin(domains[target][1], some)] for part in (z, answers))
            rows = [100 * (found == answers).double().mean().item() for found in adapted(x, y, z, classes, leading)]
            table.append(rows)
            seconds = time.perf_counter() - started
            print(f"{source} > {target}", *(f"{value:.1f}" for value in rows), f"({seconds:.1f} s)", flush=True)
    print("mean of", len(table), *(f"{value:.2f}" for value in np.mean(table, axis=0)), "(source only, graphs, served)")


def adapted(x: Tensor, y: Tensor, z: Tensor, classes: int, leading: int) -> list[Tensor]:
    """Labels of the target by the probe on the source, the graphs and the served classifier."""
    labels = graphs.label_target(both_domains(x, y, z, classes), classes=classes, leading=leading)
    served = served_logits(x, y, z, classes, leading).argmax(dim=1)
    return [labels.first, labels.probabilities.argmax(dim=1), served]


if __name__ == "__main__":
    main()
