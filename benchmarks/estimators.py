"""Label-free estimates of accuracy from the literature, for the instant effort: mean error in points. docs/results/
estimate.md.

    python benchmarks/estimators.py DATA --weights FILE --features DIR

Every fifth source image is held out; the classifier of the instant effort is made without it, and its probabilities are
calibrated on it (temperature). Then, for the target:

    confidence        mean probability of the predicted class
    DoC               accuracy on the held-out source less the difference of mean confidences (Guillory et al. 2021)
    ATC               share of the images whose confidence is above the threshold that as many held-out source images
                      reach as are right (Garg et al. 2022)
    GDE               agreement of two classifiers made from the two halves of the source (Jiang et al. 2022)
    agreement line    accuracy falls from source to target as that agreement does, in probit units (Baek et al. 2022)"""

import itertools
from statistics import NormalDist

import numpy as np
import torch
from tasks import both_domains, class_count, encoded_domains, feature_parser
from torch import Tensor
from torch.nn import functional as F

from cdtrans.methods.instant import probe_on_both
from cdtrans.pairing.graphs import label_target

HELD_OUT = 5  # every fifth source image
TEMPERATURES = torch.logspace(-1, 1, 41)


def adapted(x: Tensor, y: Tensor, z: Tensor, held: Tensor, classes: int, leading: int) -> tuple[Tensor, Tensor]:
    """Logits of held-out source images and of the target, by the classifier of the instant effort."""
    domains = both_domains(x, y, z, classes)
    labels = label_target(domains, classes=classes, leading=leading).probabilities
    probe, of_source, of_target = probe_on_both(domains, labels)
    return tuple(s.standardised(f) @ probe.weight + probe.bias for s, f in ((of_source, held), (of_target, z)))  # type: ignore[return-value]


def estimates(x: Tensor, y: Tensor, z: Tensor, classes: int, leading: int) -> tuple[Tensor, dict[str, float]]:
    """Predictions for the target, and what each estimator says of them."""
    out = torch.arange(len(y)) % HELD_OUT == 0
    on_source, on_target = adapted(x[~out], y[~out], z, x[out], classes, leading)
    losses = [float(F.cross_entropy(on_source / t, y[out])) for t in TEMPERATURES]
    hot = TEMPERATURES[int(np.argmin(losses))]
    p, q = (logits.div(hot).softmax(dim=1).amax(dim=1) for logits in (on_source, on_target))
    accuracy = float((on_source.argmax(dim=1) == y[out]).double().mean())
    threshold = float(p.sort().values[min(len(p) - 1, round((1 - accuracy) * len(p)))])
    kept_x, kept_y = x[~out], y[~out]
    first = torch.arange(len(kept_y)) % 2 == 0
    halves = [adapted(kept_x[half], kept_y[half], z, x[out], classes, leading) for half in (first, ~first)]
    agreement = [float((a.argmax(dim=1) == b.argmax(dim=1)).double().mean()) for a, b in zip(*halves, strict=True)]
    probit = NormalDist().inv_cdf
    bounded = [min(max(share, 0.01), 0.99) for share in (accuracy, *agreement)]
    line = NormalDist().cdf(probit(bounded[0]) + probit(bounded[2]) - probit(bounded[1]))  # slope 1, as they find
    return on_target.argmax(dim=1), {
        "confidence": float(q.mean()),
        "DoC": accuracy - float(p.mean() - q.mean()),
        "ATC": float((q >= threshold).double().mean()),
        "GDE": agreement[1],
        "agreement line": line,
    }


def main() -> None:
    arguments = feature_parser(__doc__).parse_args()
    domains = encoded_domains(arguments.data, arguments)
    classes = class_count(domains)
    errors: dict[str, list[float]] = {}
    for source, target in itertools.permutations(domains, 2):
        (x, y, leading), (z, truth, _) = domains[source], domains[target]
        predicted, found = estimates(x, y, z, classes, leading)
        right = float((predicted == truth).double().mean())
        for name, value in found.items():
            errors.setdefault(name, []).append(100 * (value - right))
        print(f"{source} > {target}: {100 * right:.1f};", *(f"{k} {100 * v:.1f}" for k, v in found.items()), flush=True)
    print("| | mean error | bias | within 13.6 points |\n|---|---|---|---|")
    for name, values in errors.items():
        e = np.array(values)
        print(f"| {name} | {np.abs(e).mean():.1f} | {e.mean():+.1f} | {(np.abs(e) <= 13.6).sum()} of {len(e)} |")


if __name__ == "__main__":
    main()
