"""The supplement's analysis as a simulation: noisy inputs, two ways of averaging, and the theorems about them.

Inputs are x_i = u_{k_i} + h_i: a unit centre and Gaussian noise of length about sigma. Averaging each input with
similar ones should bring it closer to its centre. Theorem 1 averages the K nearest, Theorem 2 is softmax attention.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import numpy as np

DELTA = 0.05  # the theorems are claims "with probability 1 - 3 delta" and "1 - 4 delta"
ORTHOGONAL = math.sqrt(2)  # the distance of orthogonal unit centres
ADAMCZAK = 1.0  # Theorem 1's "universal constant", to which the paper gives no value
MANY = 10  # inputs per cluster: our reading of the text's C << m


@dataclass(frozen=True)
class Setting:
    """The supplement's problem: clusters N(u_k, sigma^2/d I) of equal size, every two centres `separation` apart."""

    dimension: int  # d
    clusters: int  # C
    members: int  # m_k
    sigma: float
    separation: float = ORTHOGONAL  # r_l = r_u, which Theorem 2 calls gamma_l

    def __post_init__(self) -> None:
        if self.dimension < self.clusters:
            raise ValueError(f"{self.clusters} centres at equal distances need as many dimensions.")
        if 1 + (self.clusters - 1) * self.cosine < -1e-9:
            raise ValueError(f"{self.clusters} unit vectors cannot all be {self.separation} apart.")

    @property
    def samples(self) -> int:
        return self.clusters * self.members  # m

    @property
    def cosine(self) -> float:
        """The inner product of two centres."""
        return 1 - self.separation**2 / 2

    @property
    def log_term(self) -> float:
        """log(m / delta), which all of Theorem 1 scales with."""
        return math.log(self.samples / DELTA)

    @property
    def softmax_log_term(self) -> float:
        """log(2m / (delta sigma)), its counterpart in Theorem 2."""
        return math.log(2 * self.samples / (DELTA * self.sigma))


class Averaging(Protocol):
    """A way of averaging, with the conditions and the claim of its theorem."""

    @property
    def theorem(self) -> int: ...

    @property
    def probability(self) -> float: ...

    @property
    def parameter(self) -> float: ...

    def weights(self, gram: np.ndarray) -> np.ndarray: ...

    def needed_dimension(self, setting: Setting) -> int: ...

    def conditions(self, setting: Setting) -> dict[str, bool]: ...

    def bound(self, setting: Setting) -> float: ...

    def claim(self, setting: Setting, before: np.ndarray, after: np.ndarray) -> np.ndarray: ...


@dataclass(frozen=True)
class NearestMean:
    """Analysis I: each input becomes the mean of its K nearest, itself among them."""

    neighbours: int  # K
    theorem = 1
    probability = 1 - 3 * DELTA

    @property
    def parameter(self) -> float:
        return self.neighbours

    def weights(self, gram: np.ndarray) -> np.ndarray:
        """Inner products [m, m] -> the weight of input j in the average of input i [m, m]."""
        norms = np.diagonal(gram)
        distances = norms[:, None] + norms - 2 * gram
        nearest = np.argpartition(distances, self.neighbours - 1, axis=1)[:, : self.neighbours]  # [m, K]
        weights = np.zeros_like(gram)
        np.put_along_axis(weights, nearest, 1 / self.neighbours, axis=1)
        return weights

    def needed_dimension(self, setting: Setting) -> int:
        """The least d of Theorem 1. The formula squares r_l - 2 sigma, so that its sign is lost."""
        gap = setting.separation - 2 * setting.sigma
        return math.ceil(max(8.0, 2 * setting.sigma**2 / gap**2) * setting.log_term)

    def conditions(self, setting: Setting) -> dict[str, bool]:
        """The conditions of Theorem 1, K < m_k from the text above it and r_l > 2 sigma from its proof."""
        return {
            "d": setting.dimension >= self.needed_dimension(setting),
            "K >= 9 log(m/delta)": self.neighbours >= least_neighbours(setting.samples),
            "K < m_k": self.neighbours < setting.members,
            "r > 2 sigma": setting.separation > 2 * setting.sigma,
        }

    def bound(self, setting: Setting) -> float:
        """The proof's bound on |x_i' - u|: C sigma (1/K + sqrt(log(m/delta) / K))."""
        return ADAMCZAK * setting.sigma * (1 / self.neighbours + math.sqrt(setting.log_term / self.neighbours))

    def claim(self, setting: Setting, before: np.ndarray, after: np.ndarray) -> np.ndarray:
        """|x_i' - u| < |x_i - u|."""
        return after < before


@dataclass(frozen=True)
class SoftmaxMean:
    """Analysis II: softmax attention with W_K = lambda I. `itself`: the sum includes j = i, as in the paper."""

    lam: float
    itself: bool = True
    theorem = 2
    probability = 1 - 4 * DELTA

    @property
    def parameter(self) -> float:
        return self.lam

    def weights(self, gram: np.ndarray) -> np.ndarray:
        """Inner products [m, m] -> the attention of input i to input j [m, m]."""
        logits = self.lam * gram
        if not self.itself:
            np.fill_diagonal(logits, -np.inf)
        weights: np.ndarray = np.exp(logits - logits.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        return weights

    def needed_dimension(self, setting: Setting) -> int:
        """The least d of Theorem 2: 20 lambda sqrt(log(2m/(delta sigma)) / d) <= 1/4, and log(m/(2 delta sigma^2))."""
        other = math.log(setting.samples / (2 * DELTA * setting.sigma**2))
        return math.ceil(max((80 * self.lam) ** 2 * setting.softmax_log_term, other))

    def conditions(self, setting: Setting) -> dict[str, bool]:
        """The conditions of Theorem 2, and C << m from the text."""
        return {
            "d": setting.dimension >= self.needed_dimension(setting),
            "lambda": self.lam >= least_lambda(setting),
            "r near sqrt 2": abs(ORTHOGONAL - setting.separation) <= 0.5,
            "sigma <= 1": setting.sigma <= 1,
            "C << m": setting.members >= MANY,
        }

    def bound(self, setting: Setting) -> float:
        """The last line of the proof: 6m/m_i exp(-lambda/2) + 20 lambda sigma sqrt(log(2m/(delta sigma)) / d)."""
        leak = 6 * setting.clusters * math.exp(-self.lam / 2)
        return leak + 20 * self.lam * setting.sigma * math.sqrt(setting.softmax_log_term / setting.dimension)

    def claim(self, setting: Setting, before: np.ndarray, after: np.ndarray) -> np.ndarray:
        """|x_i' - u| <= sigma / 2."""
        return after <= setting.sigma / 2


def least_neighbours(samples: int) -> int:
    """The least K of Theorem 1."""
    return math.ceil(9 * math.log(samples / DELTA))


def least_lambda(setting: Setting) -> float:
    """The least lambda of Theorem 2, where 6m/m_i exp(-lambda/2) = sigma/4."""
    return 2 * math.log(24 * setting.clusters / setting.sigma)


def least_setting(clusters: int, members: int, sigma: float, separation: float = ORTHOGONAL) -> tuple[Setting, float]:
    """The setting and the lambda that only just meet Theorem 2."""
    setting = Setting(clusters, clusters, members, sigma, separation)
    lam = least_lambda(setting)
    return replace(setting, dimension=SoftmaxMean(lam).needed_dimension(setting)), lam


def limit_noise(setting: Setting, averaging: SoftmaxMean) -> float:
    """|x_i' - u| as d goes to infinity: there <x_i, x_j> is 1 + sigma^2 for j = i, 1 within a cluster, and the
    centres' cosine elsewhere, and all noises are orthogonal. Not in the paper."""
    mates, others = setting.members - 1, setting.samples - setting.members
    top = setting.sigma**2 if averaging.itself else 0.0  # the largest exponent, over lambda: exp(0) cannot overflow
    itself = 1.0 if averaging.itself else 0.0
    mate, other = math.exp(-averaging.lam * top), math.exp(averaging.lam * (setting.cosine - 1 - top))
    noise = setting.sigma**2 * (itself + mates * mate**2 + others * other**2)
    rest = max(setting.clusters - 1, 1)
    away = 1 - 2 * setting.cosine + (1 + (rest - 1) * setting.cosine) / rest  # |mean of the other centres - u|^2
    return math.sqrt(noise + (others * other) ** 2 * away) / (itself + mates * mate + others * other)


def draw(setting: Setting, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and the centre of each: [m, p] both, in coordinates whose first C axes span the centres."""
    noise = draw_noise(setting, rng)  # [m, p]
    centres = np.zeros_like(noise)
    centres[:, : setting.clusters] = np.repeat(place_centres(setting), setting.members, axis=0)
    return centres + noise, centres


def place_centres(setting: Setting) -> np.ndarray:
    """Unit vectors with equal inner products: the square root of their Gram matrix, [C, C]."""
    c, cosine = setting.clusters, setting.cosine
    along, across = math.sqrt(max(1 + (c - 1) * cosine, 0)), math.sqrt(1 - cosine)
    return across * np.eye(c) + (along - across) / c


def draw_noise(setting: Setting, rng: np.random.Generator) -> np.ndarray:
    """h: [m, min(d, C + m)].

    The averages depend on inner products alone. Outside the C axes of the centres those of the noise are a Wishart
    matrix, whose triangular root (Bartlett 1933) has m axes whatever d is: a million dimensions cost no more."""
    m, d, c = setting.samples, setting.dimension, setting.clusters
    scale = setting.sigma / math.sqrt(d)
    if d <= c + m:
        return scale * rng.standard_normal((m, d))
    spanned = rng.standard_normal((m, c))
    outside = np.tril(rng.standard_normal((m, m)), -1)
    np.fill_diagonal(outside, np.sqrt(rng.chisquare(d - c - np.arange(m))))
    return scale * np.hstack([spanned, outside])


@dataclass(frozen=True)
class Row:
    """The measurements in one setting, over all inputs and trials, and the theorem's verdict."""

    setting: Setting
    averaging: Averaging
    before: float  # mean |x_i - u|
    after: float  # mean |x_i' - u|
    worst: float  # the largest |x_i' - u|
    own: float  # mean weight on the own cluster, itself included
    itself: float  # mean weight on itself
    claim_rate: float  # share of the trials in which the claim is true of every input
    bound_rate: float  # share of the trials in which every |x_i' - u| is below the bound

    @property
    def unmet(self) -> tuple[str, ...]:
        return tuple(name for name, met in self.averaging.conditions(self.setting).items() if not met)

    @property
    def verdict(self) -> str:
        """'holds' or 'fails' if the conditions are met; 'loose' if the claim is true without them, else 'silent'."""
        true = self.claim_rate >= self.averaging.probability
        if self.unmet:
            return "loose" if true else "silent"
        return "holds" if true else "fails"

    def record(self) -> dict[str, Any]:
        """The row of theory.json. Six digits, because sums round differently on other machines."""
        numbers = ("before", "after", "worst", "own", "itself", "claim_rate", "bound_rate")
        measured = {name: float(f"{getattr(self, name):.6g}") for name in numbers}
        return {
            "theorem": self.averaging.theorem,
            **asdict(self.setting),
            "samples": self.setting.samples,
            "averaging": asdict(self.averaging),  # type: ignore[call-overload]
            **measured,
            "bound": float(f"{self.averaging.bound(self.setting):.6g}"),
            "needed_dimension": self.averaging.needed_dimension(self.setting),
            "unmet": list(self.unmet),
            "verdict": self.verdict,
        }


def measure(setting: Setting, averagings: Sequence[Averaging], *, seed: int, trials: int) -> list[Row]:
    """A row for each way of averaging; all use the same inputs."""
    trial_values: list[list[dict[str, float]]] = [[] for _ in averagings]
    for trial in range(trials):
        points, centres = draw(setting, np.random.default_rng([seed, trial]))  # [m, p]
        gram = points @ points.T  # [m, m]
        for averaging, values in zip(averagings, trial_values, strict=True):
            values.append(_average(setting, averaging, points, centres, gram))
    rows = []
    for averaging, values in zip(averagings, trial_values, strict=True):
        over_trials = {name: max if name == "worst" else np.mean for name in values[0]}
        numbers = {name: float(reduce([v[name] for v in values])) for name, reduce in over_trials.items()}
        rows.append(Row(setting, averaging, **numbers))
    return rows


def _average(
    setting: Setting, averaging: Averaging, points: np.ndarray, centres: np.ndarray, gram: np.ndarray
) -> dict[str, float]:
    """One trial of one way of averaging: the numbers of a Row."""
    before = np.linalg.norm(points - centres, axis=1)  # [m]
    weights = averaging.weights(gram)  # [m, m]
    after = np.linalg.norm(weights @ points - centres, axis=1)  # [m]
    cluster = np.arange(setting.samples) // setting.members
    by_cluster = np.add.reduceat(weights, np.arange(0, setting.samples, setting.members), axis=1)  # [m, C]
    return {
        "before": before.mean(),
        "after": after.mean(),
        "worst": after.max(),
        "own": by_cluster[np.arange(setting.samples), cluster].mean(),
        "itself": np.diagonal(weights).mean(),
        "claim_rate": averaging.claim(setting, before, after).all(),
        "bound_rate": (after <= averaging.bound(setting)).all(),
    }
