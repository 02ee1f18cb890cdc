"""Steps of the supplement's proofs that can be checked separately, and its conditions for a vision transformer."""

import math
from typing import Any

import numpy as np

from research.theory.averaging import (
    DELTA,
    ORTHOGONAL,
    Setting,
    SoftmaxMean,
    draw_noise,
    least_lambda,
    least_setting,
    limit_noise,
)

SHELL_TRIALS = 400  # cheap, and a claim of probability 0.95 needs more trials than one of 0.8
VIT_WIDTH, VIT_PATCHES = 384, 196  # DeiT-small on a 224-pixel image
PAST_ALL_CONDITIONS = 10**12  # a dimension that meets Theorem 2 for every lambda up to 500


def proof_steps(seed: int) -> dict[str, list[dict[str, Any]]]:
    """The steps of the proofs that can be checked separately."""
    separations = np.linspace(0.1, 2.0, 20).round(1).tolist()
    shells = [(m, d) for m in (64, 256, 1024, 4096, 16384) for d in (math.ceil(8 * math.log(m / DELTA)), 10**4)]
    return {
        "lemma_1": [lemma_1(r) for r in separations],
        "lemma_2": [lemma_2(least_setting(4, 64, sigma)[0], seed) for sigma in (0.25, 1.0)],
        "shell": [shell(m, d, seed) for m, d in shells],
        "least_dimension": [least_dimension(c, s) for s in (1.0, 0.5, 0.25, 0.1) for c in (2, 4, 8, 16, 32, 64)],
        "limit": [limit(sigma, n) for sigma in (0.5, 0.7, 1.0) for n in (16, 128, 1024, 8192)],
    }


def lemma_1(separation: float) -> dict[str, Any]:
    """|<u_i, u_j>| of two centres at this distance, and what Lemma 1 allows: sqrt 2 |1 - r/sqrt 2|."""
    cosine, allowed = abs(1 - separation**2 / 2), abs(ORTHOGONAL - separation)
    return {"separation": separation, "cosine": cosine, "lemma": allowed, "holds": cosine <= allowed + 1e-12}


def lemma_2(setting: Setting, seed: int) -> dict[str, Any]:
    """The largest |<h_i, h_j>| over Lemma 2's bound on it "for any i, j": apart, and for i = j."""
    noise = draw_noise(setting, np.random.default_rng(seed))
    products = np.abs(noise @ noise.T)
    log_term = math.log(setting.samples / (2 * DELTA * setting.sigma**2))
    bound = 2 * setting.sigma**2 * math.sqrt(log_term / setting.dimension)
    same = np.diagonal(products).max()
    np.fill_diagonal(products, 0)
    ratios = {"apart": products.max() / bound, "same": same / bound}
    return {"dimension": setting.dimension, "sigma": setting.sigma} | {k: float(f"{v:.6g}") for k, v in ratios.items()}


def shell(samples: int, dimension: int, seed: int) -> dict[str, Any]:
    """How often some |x_i - u| leaves sigma (1 -+ 1/2 sqrt(2/d log(m/delta))); the proof of Theorem 1 allows delta."""
    rng = np.random.default_rng([seed, samples, dimension])
    lengths = np.sqrt(rng.chisquare(dimension, (SHELL_TRIALS, samples)) / dimension)  # |x_i - u| / sigma
    half = 0.5 * math.sqrt(2 / dimension * math.log(samples / DELTA))
    left = (np.abs(lengths - 1) > half).any(axis=1).mean()
    return {"samples": samples, "dimension": dimension, "left": float(left), "allowed": DELTA}


def least_dimension(clusters: int, sigma: float) -> dict[str, Any]:
    """The dimension that Theorem 2 needs for the patches of one image in so many clusters."""
    setting = Setting(clusters, clusters, max(VIT_PATCHES // clusters, 1), sigma)
    lam = least_lambda(setting)
    needed = SoftmaxMean(lam).needed_dimension(setting)
    return {"clusters": clusters, "sigma": sigma, "lambda": round(lam, 3), "dimension": needed}


def limit(sigma: float, members: int) -> dict[str, Any]:
    """Theorem 2 with every condition met and d going to infinity, two clusters: |x_i' - u| / sigma, which it bounds by
    1/2. A closed form, so it works for clusters that are too large to simulate."""
    setting = Setting(PAST_ALL_CONDITIONS, 2, members, sigma)
    noise = limit_noise(setting, SoftmaxMean(least_lambda(setting))) / sigma
    return {"sigma": sigma, "members": members, "noise_over_sigma": float(f"{noise:.6g}")}
