"""The instant effort on every task of a data set, without a run folder for each: accuracy in percent.

    python benchmarks/instant.py DATA --weights FILE [--imbalance 10 --orders 2] [--each 5] [--few 2] [--pull 0]

DATA holds one folder of class folders for each domain (or DOMAIN/images). Each domain is encoded once. `--imbalance 10`
thins the target's classes out to 10:1, in that many random orders of the classes; `--source-imbalance` does it to the
source; `--each 5` keeps five source images of each class, `--few 2` two of the target's classes; `--pull 0` leaves
class shares as they are predicted."""

import argparse
import itertools
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cdtrans.config import Resolved, make_config, read_recipe
from cdtrans.inputs.decode import decode_domain
from cdtrans.inputs.scan import scan_labelled
from cdtrans.methods.base import Round, Sizes
from cdtrans.methods.instant import Instant
from cdtrans.network.encoding import Encoded, Encoder
from cdtrans.network.weights import make_card
from cdtrans.pairing import graphs
from cdtrans.pairing.pairs import Domains
from cdtrans.run.pipeline import resolve
from cdtrans.run.stage1 import initial_network
from cdtrans.runtime.screen import Screen


def thinned(labels: Tensor, ratio: float, seed: int) -> Tensor:
    """Rows of a subset whose classes shrink geometrically to 1 / ratio, in a random order of the classes."""
    rng = np.random.default_rng(seed)
    classes = int(labels.max()) + 1
    rows = []
    for rank, k in enumerate(rng.permutation(classes)):
        members = np.flatnonzero(labels.numpy() == k)
        rows.append(rng.choice(members, max(1, round(len(members) * ratio ** (-rank / (classes - 1)))), replace=False))
    return torch.from_numpy(np.sort(np.concatenate(rows)))


def first_of_each(labels: Tensor, each: int) -> Tensor:
    return torch.cat([(labels == k).nonzero().squeeze(1)[:each] for k in labels.unique()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--backbone", default="deit_tiny_patch16_224")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--taps", type=int, default=read_recipe("best")["taps"])
    parser.add_argument("--imbalance", type=float, default=1)
    parser.add_argument("--source-imbalance", type=float, default=1)
    parser.add_argument("--orders", type=int, default=1)
    parser.add_argument("--each", type=int)
    parser.add_argument("--few", type=int)
    parser.add_argument("--pull", type=float, default=graphs.PULL)
    parser.add_argument("--features", type=Path, help="keep the features here, and take them from here")
    arguments = parser.parse_args()
    graphs.PULL = arguments.pull

    settings = {"backbone": arguments.backbone, "weights": arguments.weights and str(arguments.weights)}
    config = resolve(make_config(read_recipe("best") | settings | {"taps": arguments.taps}))
    screen, domains = Screen(quiet=True), {}
    for folder in sorted(path for path in arguments.data.iterdir() if path.is_dir()):
        domains[folder.name] = features_of(folder, config, screen, arguments.features)
    classes = 1 + max(int(labels.max()) for _, labels, _ in domains.values())
    leading = next(iter(domains.values()))[2]

    table = []
    for order in range(arguments.orders):
        for source, target in itertools.permutations(domains, 2):
            started = time.perf_counter()
            (x, y, _), (z, answers, _) = domains[source], domains[target]
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


def features_of(folder: Path, config: Resolved, screen: Screen, store: Path | None) -> tuple[Tensor, Tensor, int]:
    """Features [N, D], labels [N], and how many features are those of the last two blocks."""
    inner = folder / "images"
    domain = scan_labelled(inner if inner.is_dir() else folder, None)
    network = initial_network(config, make_card(config, domain.classes, stage="source", epoch=0))
    kept = store and store / f"{folder.name}.npy"
    if kept and kept.exists():
        return torch.from_numpy(np.load(kept)), torch.tensor(domain.labels), network.leading
    decoded = decode_domain(domain, config, screen, folder.name)
    card = make_card(config, domain.classes, stage="source", epoch=0)
    device = torch.device(config.device)
    found = Encoder(network.to(device), config, screen, {})(decoded.images(card, device), folder.name).features.cpu()
    if kept:
        kept.parent.mkdir(parents=True, exist_ok=True)
        np.save(kept, found.numpy())
    return found, torch.tensor(decoded.domain.labels), network.leading


def adapted(x: Tensor, y: Tensor, z: Tensor, classes: int, leading: int) -> list[Tensor]:
    """Labels of the target by the probe on the source, the graphs and the served classifier."""
    blank = torch.zeros(len(x), classes), torch.zeros(len(z), classes)
    domains = Domains(Encoded(x, blank[0]), y, Encoded(z, blank[1]))
    labels = graphs.label_target(domains, classes=classes, leading=leading)
    method = Instant(Stand(x.shape[1], leading), None, Sizes(classes, len(x), len(z)))  # type: ignore[arg-type]
    method.plan(domains, Round(1, 1, 1), torch.Generator())
    served = method.probe.eval().classify(z).logits.argmax(dim=1)
    return [labels.first, labels.probabilities.argmax(dim=1), served]


class Stand(torch.nn.Module):
    """In place of a network whose features are there already."""

    def __init__(self, dim: int, leading: int) -> None:
        super().__init__()
        self.dim, self.leading = dim, leading


if __name__ == "__main__":
    main()
