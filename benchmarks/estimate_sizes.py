"""How many images the estimated accuracy needs, with the instant effort. docs/results/estimate.md.

    python benchmarks/estimate_sizes.py DATA ... --weights FILE --features DIR

Each DATA holds one folder of class folders for each domain (or DOMAIN/images). For every ordered pair of its domains,
the source or the target is reduced to N images of each class. The range is that of `trust.estimate`, given wherever the
guard's support allows it, however few the images; the truth is the accuracy on the images that are left."""

import argparse
import itertools
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from instant import adapted, features_of
from torch import Tensor

from cdtrans.config import BEST, make_config
from cdtrans.model.encoding import Encoded
from cdtrans.pairing.pairs import Domains
from cdtrans.run.session import decided
from cdtrans.runtime.screen import Screen
from cdtrans.trust import guard
from cdtrans.trust.estimate import HALF_WIDTH, estimate
from cdtrans.trust.support import Evidence

EACH = (5, 10, 20, 40)


class Range(NamedTuple):
    middle: float
    truth: float
    source: int  # images
    target: int


def some_of_each(labels: Tensor, each: int, rng: np.random.Generator) -> Tensor:
    rows = [rng.permutation((labels == k).nonzero().squeeze(1).numpy())[:each] for k in labels.unique()]
    return torch.from_numpy(np.sort(np.concatenate(rows)))


def estimated(x: Tensor, y: Tensor, z: Tensor, truth: Tensor, classes: int, leading: int) -> Range | None:
    """None if the guard's support does not allow one."""
    before, _, after = adapted(x, y, z, classes, leading)
    domains = Domains(Encoded(x, torch.zeros(len(x), classes)), y, Encoded(z, torch.zeros(len(z), classes)))
    evidence = Evidence.of(domains, classes, pretrained=True)
    start, found = evidence.support(before), evidence.support(after)
    if not guard.supported(found) or start.mean - found.mean > guard.FELL:
        return None
    middle = estimate(found, start, known=True, labels=0).accuracy
    return Range(middle, float((after == truth).double().mean()), len(x), len(z))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="+")
    parser.add_argument("--backbone", default="deit_tiny_patch16_224")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--features", type=Path, help="keep the features here, and take them from here")
    arguments = parser.parse_args()
    settings = {"backbone": arguments.backbone, "weights": arguments.weights and str(arguments.weights)}
    config, screen = decided(make_config(BEST | settings)), Screen(quiet=True)
    print("| data | reduced | per class | ranges | source images | target images | error | too high by | held |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for data in arguments.data:
        folders = sorted(path for path in data.iterdir() if path.is_dir())
        domains = {f.name: features_of(f, config, screen, arguments.features) for f in folders}
        classes = 1 + max(int(labels.max()) for _, labels, _ in domains.values())
        for side, each in itertools.product(("source", "target"), EACH):
            found = []
            for source, target in itertools.permutations(domains, 2):
                (x, y, leading), (z, truth, _) = domains[source], domains[target]
                rng = np.random.default_rng(zlib.crc32(f"{source} {target} {side} {each}".encode()))
                if side == "source":
                    rows = some_of_each(y, each, rng)
                    x, y = x[rows], y[rows]
                else:
                    rows = some_of_each(truth, each, rng)
                    z, truth = z[rows], truth[rows]
                found.append(estimated(x, y, z, truth, classes, leading))
            ranges = [r for r in found if r is not None]
            if ranges:
                errors = np.array([r.middle - r.truth for r in ranges])
                means = [f"{np.mean([r.source for r in ranges]):.0f}", f"{np.mean([r.target for r in ranges]):.0f}"]
                held = f"{(np.abs(errors) <= HALF_WIDTH).sum()} of {len(ranges)}"
                cells = [side, each, f"{len(ranges)} of {len(found)}", *means]
                cells += [f"{100 * np.abs(errors).mean():.1f}", f"{100 * errors.mean():+.1f}", held]
                print(f"| {data.name} | {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()
