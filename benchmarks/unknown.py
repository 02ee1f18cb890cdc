"""Which score finds target images of classes that the source does not have? The area under the ROC curve, in percent.

    python benchmarks/unknown.py DATA --weights FILE [--features FOLDER] [--splits 5] [--known 0.5]

DATA as for instant.py. For each task and split, a random half of the classes is taken away from the source, the frozen
backbone is adapted (`--effort instant`) to the whole target, and each score tells its images of absent classes from the
others: 50 is guessing. `--each` prints every task."""

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from instant import Stand, features_of
from sklearn.metrics import roc_auc_score
from torch import Tensor

from cdtrans.config import BEST, make_config
from cdtrans.methods.base import Round, Sizes
from cdtrans.methods.instant import Instant
from cdtrans.model.encoding import Encoded
from cdtrans.pairing.graphs import LOOSE, Statistics, fit_probe
from cdtrans.pairing.neighbours import normalised
from cdtrans.pairing.pairs import Domains
from cdtrans.run.session import decided
from cdtrans.runtime.screen import Screen

SCORES: dict[str, Callable[[Tensor], Tensor]] = {  # of logits [N, K]; high where no class fits
    "1 - largest probability": lambda x: 1 - x.softmax(dim=1).amax(dim=1),
    "entropy": lambda x: torch.special.entr(x.softmax(dim=1)).sum(dim=1),
    "- margin of the two best": lambda x: x.softmax(dim=1).topk(2).values.diff(dim=1).squeeze(1),
    "- largest logit": lambda x: -x.amax(dim=1),
    "- largest logit above the mean": lambda x: x.mean(dim=1) - x.amax(dim=1),
    "energy (- logsumexp)": lambda x: -x.logsumexp(dim=1),
}
TEMPERATURES = (0.5, 1.0, 2.0, 4.0)
DISTANCES = ("distance to the nearest class mean", "cosine distance to it")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--backbone", default="deit_tiny_patch16_224")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--features", type=Path, help="keep the features here, and take them from here")
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--known", type=float, default=0.5, help="share of the classes that the source has")
    parser.add_argument("--each", action="store_true")
    arguments = parser.parse_args()

    settings = {"backbone": arguments.backbone, "weights": arguments.weights and str(arguments.weights)}
    config, screen, domains = decided(make_config(BEST | settings)), Screen(quiet=True), {}
    for folder in sorted(path for path in arguments.data.iterdir() if path.is_dir()):
        domains[folder.name] = features_of(folder, config, screen, arguments.features)
    classes = 1 + max(int(labels.max()) for _, labels, _ in domains.values())

    found: dict[str, dict[str, list[float]]] = {"adapted": {}, "source-only": {}}
    for source, target in itertools.permutations(domains, 2):
        (x, y, leading), (z, answers, _) = domains[source], domains[target]
        task: dict[str, list[float]] = {}
        for split in range(arguments.splits):
            order = torch.from_numpy(np.random.default_rng(split).permutation(classes))
            known = order[: round(arguments.known * classes)].sort().values
            rows = torch.isin(y, known)
            for model, (logits, distances) in served(
                x[rows], torch.searchsorted(known, y[rows]), z, len(known), leading
            ).items():
                for name, values in scored(logits, distances).items():
                    area = 100 * roc_auc_score((~torch.isin(answers, known)).numpy(), values.double().numpy())
                    found[model].setdefault(name, []).append(area)
                    task.setdefault(f"{model}: {name}", []).append(area)
        if arguments.each:
            print(f"{source} > {target}")
            for name, areas in task.items():
                print(f"    {np.mean(areas):5.1f}  {name}", flush=True)
    for model, table in found.items():
        count = len(next(iter(table.values())))
        print(f"{model}, {count} adaptations: mean, lowest, share of them over 65")
        for name, areas in table.items():
            over = np.mean(np.array(areas) > 65)
            print(f"    {np.mean(areas):5.1f} {min(areas):5.1f} {100 * over:4.0f}%  {name}")


def served(x: Tensor, y: Tensor, z: Tensor, classes: int, leading: int) -> dict[str, tuple[Tensor, Tensor]]:
    """The logits of the target [Nt, K] and distances [Nt, 2] by the classifier of `--effort instant` and by the
    source-only one."""
    domains = Domains(Encoded(x, torch.zeros(len(x), classes)), y, Encoded(z, torch.zeros(len(z), classes)))
    method = Instant(Stand(x.shape[1], leading), None, Sizes(classes, len(x), len(z)))  # type: ignore[arg-type]
    method.plan(domains, Round(1, 1, 1), torch.Generator())
    with torch.no_grad():
        adapted = method.probe.eval().classify(z).logits
    of_source, of_target = Statistics.of(x), Statistics.of(z)
    s, t = of_source.standardised(x), of_target.standardised(z)
    source_only = fit_probe(s, torch.nn.functional.one_hot(y, classes).to(s), LOOSE)
    return {
        "adapted": (adapted, distances_to_means(torch.cat([s, t]), torch.cat([y, adapted.argmax(dim=1)]), t, classes)),
        "source-only": (t @ source_only.weight + source_only.bias, distances_to_means(s, y, t, classes)),
    }


def distances_to_means(x: Tensor, y: Tensor, queries: Tensor, classes: int) -> Tensor:
    means = torch.stack([x[y == k].mean(dim=0) for k in range(classes)])
    cosine = 1 - normalised(queries) @ normalised(means).T
    return torch.stack([torch.cdist(queries, means).amin(dim=1), cosine.amin(dim=1)], dim=1)


def scored(logits: Tensor, distances: Tensor) -> dict[str, Tensor]:
    """[Nt] each. A temperature changes the order of the images, but not that by the largest logit."""
    values = {
        f"{name}, temperature {temperature:g}": score(logits / temperature)
        for name, score in SCORES.items()
        for temperature in ((1.0,) if name.startswith("- largest") else TEMPERATURES)
    }
    return values | dict(zip(DISTANCES, distances.T, strict=True))


if __name__ == "__main__":
    main()
