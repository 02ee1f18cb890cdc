"""Adjusted mutual information (Vinh, Epps and Bailey, 2010) of two labellings of the same items: 1 if they are equal
up to the names of the labels, 0 on average for random ones.

Not scikit-learn's, because its import takes longer than an epoch on a small target."""

import numpy as np


def adjusted_mutual_information(first: np.ndarray, second: np.ndarray) -> float:
    """Two labellings of N items, [N] integers each."""
    (_, first, a), (_, second, b) = (np.unique(x, return_inverse=True, return_counts=True) for x in (first, second))
    both = np.unique(first * len(b) + second, return_counts=True)[1]  # items per pair of labels
    if len(a) == len(b) == len(both):  # equal up to names
        return 1.0
    mutual = entropy(a) + entropy(b) - entropy(both)
    by_chance = expected_mutual_information(a, b)
    most = (entropy(a) + entropy(b)) / 2 - by_chance
    return (mutual - by_chance) / most


def entropy(counts: np.ndarray) -> float:
    """The entropy of the distribution with these counts, in nats."""
    total = counts.sum()
    return float(np.log(total) - (counts * np.log(counts)).sum() / total)


def expected_mutual_information(a: np.ndarray, b: np.ndarray) -> float:
    """The mean over all pairs of labellings with these class sizes. The number n of items that a class of size a and
    one of size b share is hypergeometric. Classes of equal size are counted together, because there are few distinct
    sizes."""
    total = int(a.sum())
    (sizes_a, times_a), (sizes_b, times_b) = np.unique(a, return_counts=True), np.unique(b, return_counts=True)
    a, b = (sizes.ravel() for sizes in np.meshgrid(sizes_a, sizes_b, indexing="ij"))  # [P] pairs of sizes
    times = np.outer(times_a, times_b).ravel()
    fewest, most = np.maximum(a + b - total, 1), np.minimum(a, b)
    shared = np.maximum(most - fewest + 1, 0)  # [P] how many n are possible
    pair = np.repeat(np.arange(len(a)), shared)  # [S]
    n = np.arange(len(pair)) - np.repeat(np.cumsum(shared) - shared, shared) + fewest[pair]
    a, b, times = a[pair], b[pair], times[pair]
    log_factorial = np.append(0.0, np.cumsum(np.log(np.arange(1, total + 1))))
    log_chance = (
        (log_factorial[a] + log_factorial[b] + log_factorial[total - a] + log_factorial[total - b])
        - (log_factorial[total] + log_factorial[n] + log_factorial[a - n] + log_factorial[b - n])
        - log_factorial[total - a - b + n]
    )
    gain = n / total * np.log(total * n / (a * b))
    return float((times * gain * np.exp(log_chance)).sum())
