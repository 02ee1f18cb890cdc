"""Targets with other classes than the source, on frozen features: what is noticed, told and asked is worth.

    python benchmarks/classsets.py DATA ... --table partial|asked|open|labels|estimate|constants --weights FILE
        [--features FOLDER]

DATA as for instant.py. Each table prints a line per task and then means over the tasks of a data set.

    partial    accuracy of the graphs' labels where the target has few of the classes, all of them, and all of them
               thinned out to 10:1
    asked      the same if a person says of every class whether one of its candidates shows it (page 1 of `cdtrans
               ask`), and what it costs to skip the classes that are least in doubt
    open       images of no class: AUROC of two scores; H-score at a cut that 12, 24 or 48 answers place (page 2)
    labels     images to label (page 3): accuracy on the others
    estimate   how often the range that a run would claim holds the truth, an image of no class counting as wrong;
               "few" are closed tasks of few classes
    constants  those of the rule for absent classes that the other data sets would choose, and what they bring

A person is simulated with the true labels. The splits are the usual ones (docs/results/classsets.md)."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from sklearn.cluster import KMeans
from sklearn.metrics import roc_auc_score
from tasks import Features, both_domains, class_count, encoded_domains, feature_parser, thinned
from torch import Tensor
from torch.nn import functional as F

from cdtrans.methods.instant import probe_on_both
from cdtrans.network.encoding import Encoded
from cdtrans.pairing import occurring
from cdtrans.pairing.graphs import LOOSE, Probe, Start, Statistics, fit_probe, label_from, label_target
from cdtrans.pairing.narrowing import Numbering
from cdtrans.pairing.neighbours import unit_rows
from cdtrans.pairing.occurring import absent_classes, candidates, no_class_score
from cdtrans.pairing.pairs import Domains, TargetLabels
from cdtrans.record.outcome import STRANGE
from cdtrans.record.probabilities import fit_curve
from cdtrans.trust import estimate, guard
from cdtrans.trust.support import Evidence, impression

OFFICE_CALTECH = (0, 1, 5, 10, 11, 12, 15, 16, 17, 22)  # in the alphabetical order of Office-31's classes
KNOWN_ALONE, WITH_OTHERS = ("partial", "closed", "thin"), ("open", "open-partial")
CLOSED = ("closed", "thin", "few")
SKIPPED = (0.05, 0.15, 0.2)  # doubts below which a class is not asked about
ANSWERS = (12, 24, 48)
PRIVATE = (2, 3, 4, 6, 7, 8, 9, 13, 14, 18)  # the source's own in Office-31's open-partial split


class Split(NamedTuple):
    """Classes by number: in both domains, in the source alone, in the target alone."""

    shared: list[int]
    source: list[int]
    target: list[int]


class Task(NamedTuple):
    """The source's classes are numbered anew, the shared ones first; an image of another class has the number K."""

    domains: Domains
    truth: Tensor  # [Nt]
    classes: int  # K
    shared: int
    leading: int


def splits_of(classes: int, kind: str) -> list[Split]:
    every = list(range(classes))
    if kind in ("closed", "thin"):
        return [Split(every, [], [])]
    if kind == "few":
        return [Split(split.shared, [], []) for split in splits_of(classes, "open")]
    if classes == 31:
        first, own = list(OFFICE_CALTECH), list(PRIVATE)
        rest = [k for k in every if k not in first + own]
        down = every[::-1]
        return {
            "partial": [Split(first, own + rest, []), Split(down[:10], down[10:], [])],
            "open": [Split(first, [], rest), Split(down[:10], [], down[20:])],
            "open-partial": [Split(first, own, rest), Split(down[:10], down[10:20], down[20:])],
        }[kind]
    if classes == 65:
        return [
            {"partial": Split(every[:25], every[25:], []), "open": Split(every[:25], [], every[25:])}.get(
                kind, Split(every[:10], every[10:15], every[15:])
            )
        ]
    draws = (every, every[::-1])
    if kind == "partial":
        return [Split(d[:3], d[3:], []) for d in draws]
    return [Split(d[:4], [], d[4:]) if kind == "open" else Split(d[:3], d[3:5], d[5:]) for d in draws]


def tasks(domains: dict[str, Features], kind: str) -> Iterator[tuple[str, Task]]:
    for (a, source), (b, target) in itertools.permutations(domains.items(), 2):
        for n, split in enumerate(splits_of(class_count(domains), kind)):
            yield f"{a} > {b} ({n})", make_task(source, target, split, thin=kind == "thin")


def make_task(source: Features, target: Features, split: Split, *, thin: bool = False) -> Task:
    ours = split.shared + split.source
    number = torch.full((1 + max(int(source.labels.max()), int(target.labels.max())),), len(ours))
    number[torch.tensor(ours)] = torch.arange(len(ours))
    rows = torch.isin(source.labels, torch.tensor(ours))
    columns = torch.isin(target.labels, torch.tensor(split.shared + split.target))
    x, y, z, truth = source.x[rows], number[source.labels[rows]], target.x[columns], number[target.labels[columns]]
    if thin:
        some = thinned(truth, 10, 0)
        z, truth = z[some], truth[some]
    return Task(both_domains(x, y, z, len(ours)), truth, len(ours), len(split.shared), source.leading)


def correct(labels: Tensor, truth: Tensor) -> float:
    return 100 * share(labels == truth)


def labelled(start: Start, occurs: Tensor | None) -> Tensor:
    """[Nt] the graphs' labels if these classes occur, [K] bool."""
    if occurs is None:
        return label_from(start, None).probabilities.argmax(dim=1)
    return occurs.nonzero().squeeze(1)[label_from(start.only(occurs), None).probabilities.argmax(dim=1)]


def there_in(task: Task) -> Tensor:
    """[K] bool: the classes that occur."""
    return torch.bincount(task.truth, minlength=task.classes)[: task.classes] > 0


def start_of(task: Task) -> Start:
    return Start.of(task.domains, classes=task.classes, leading=task.leading)


def partial(domains: dict[str, Features]) -> None:
    table = new_table()
    for kind in KNOWN_ALONE:
        fired, found, lost = 0, [0, 0], [0, 0]
        for name, task in tasks(domains, kind):
            start, there = start_of(task), there_in(task)
            absent = absent_classes(start)
            today = labelled(start, None)
            rows = {"source only": start.probe.argmax(dim=1), "nothing noticed": today}
            rows["noticed"] = today if absent is None else labelled(start, ~absent)
            rows["told"] = today if there.all() else labelled(start, there)
            add(table, kind, name, {row: correct(labels, task.truth) for row, labels in rows.items()})
            if absent is not None:
                fired += 1
                found[0] += int((absent & ~there).sum())
                lost[0] += int((absent & there).sum())
            found[1] += int((~there).sum())
            lost[1] += int(there.sum())
        print(f"{kind}: the rule fired on {fired}; absent classes found {found}, present ones lost {lost}", flush=True)
    print_table(table)


def asked(domains: dict[str, Features]) -> None:
    table = new_table()
    for kind in (*KNOWN_ALONE, "open-partial"):
        counts = np.zeros((2, 2), dtype=int)  # classes that are absent, and that occur: wrongly said to, all
        skipped = dict.fromkeys(SKIPPED, 0)
        for name, task in tasks(domains, kind):
            start, there = start_of(task), there_in(task)
            shown, doubt = candidates(start)
            seen = (task.truth[shown] == torch.arange(task.classes)[:, None]).any(dim=1)
            today = labelled(start, None)
            rows = {"nothing told": correct(today, task.truth)}
            rows["asked"] = correct(today if seen.all() else labelled(start, seen), task.truth)
            rows |= {f"% of the classes with a doubt of {cut} or more": 100 * share(doubt >= cut) for cut in SKIPPED}
            add(table, kind, name, rows)
            for row, wrong, all_of in ((0, seen & ~there, ~there), (1, ~seen & there, there)):
                counts[row] += (int(wrong.sum()), int(all_of.sum()))
            for cut in SKIPPED:
                skipped[cut] += int(((doubt < cut) & ~there).sum())
        (stayed, absent), (lost, present) = counts.tolist()
        print(
            f"{kind}: of {absent} absent classes {stayed} stay, of {present} present ones {lost} are lost", flush=True
        )
        print(f"{kind}: absent classes below a doubt: {skipped}", flush=True)
    print_table(table)


def share(x: Tensor) -> float:
    return float(x.double().mean())


def open_set(domains: dict[str, Features]) -> None:
    table = new_table()
    for kind in WITH_OTHERS:
        for name, task in tasks(domains, kind):
            start = start_of(task)
            absent = absent_classes(start)
            occurs = None if absent is None else ~absent
            labels = labelled(start, occurs)
            known = start if occurs is None else start.only(occurs)
            score, unknown = no_class_score(known).double().numpy(), (task.truth == task.classes).numpy()
            rows = {"AUROC of 1 - largest probability": roc_auc_score(unknown, 1 - start.probe.amax(dim=1).numpy())}
            rows["AUROC of no_class"] = roc_auc_score(unknown, score)
            rows = {row: 100 * float(value) for row, value in rows.items()}
            for count in ANSWERS:
                images = np.argsort(score)[np.linspace(0, len(score) - 1, count).round().astype(int)]
                curve = fit_curve(score, score[images], unknown[images])
                rejected = score > (np.inf if curve is None else curve.cut)
                rows[f"H, {count} answers"] = h_score(labels, rejected, task)
                rows[f"error of the share of unknown images, {count} answers"] = 100 * abs(
                    (0.0 if curve is None else curve.share) - float(unknown.mean())
                )
            cuts = np.quantile(score, np.linspace(0.02, 0.98, 49))
            rows["H, best cut"] = max(h_score(labels, score > cut, task) for cut in cuts)
            add(table, kind, name, rows)
    print_table(table)


def h_score(labels: Tensor, rejected: np.ndarray, task: Task) -> float:
    """Harmonic mean of the mean accuracy per known class and the share of unknown images that are rejected."""
    right = (labels == task.truth).numpy() & ~rejected
    truth = task.truth.numpy()
    known = float(np.mean([right[truth == k].mean() for k in range(task.shared) if (truth == k).any()]))
    unknown = float(rejected[truth == task.classes].mean())
    return float(200 * known * unknown / max(known + unknown, 1e-9))


def to_label(domains: dict[str, Features]) -> None:
    table = new_table()
    for name, task in tasks(domains, "closed"):
        start = start_of(task)
        found = label_from(start, None).probabilities
        doubt = 1.05 - found.amax(dim=1).numpy()
        unit = unit_rows(start.views[0].target).numpy()
        for times in (1, 2, 4):
            count, column = times * task.classes, f"{times} a class"
            drawn = np.random.default_rng(0).choice(len(doubt), count, replace=False)
            chosen = {"at random": drawn, "doubtful and typical": medoids(unit, doubt, count)}
            rows = {"no labels": correct(found.argmax(dim=1), task.truth)}
            rows |= {row: accuracy_of_the_rest(task, torch.from_numpy(images)) for row, images in chosen.items()}
            add(table, column, name, rows)
    print_table(table)


def medoids(x: np.ndarray, weight: np.ndarray, count: int) -> np.ndarray:
    """The image nearest to the centre of each cluster of k-means."""
    means = KMeans(count, n_init=2, random_state=0, max_iter=50).fit(x, sample_weight=weight)
    distance = np.linalg.norm(x - means.cluster_centers_[means.labels_], axis=1)
    members = (np.flatnonzero(means.labels_ == k) for k in range(count))
    return np.array([some[distance[some].argmin()] for some in members])


def accuracy_of_the_rest(task: Task, images: Tensor) -> float:
    domains = replace(task.domains, given=TargetLabels(images, task.truth[images]))
    labels = label_target(domains, classes=task.classes, leading=task.leading).probabilities.argmax(dim=1)
    rest = torch.ones(len(labels), dtype=torch.bool)
    rest[images] = False
    return correct(labels[rest], task.truth[rest])


class Claim(NamedTuple):
    """The claim of an instant run, and the truth."""

    expected: float
    supported: bool  # whether it would give a range, whatever is known of the classes
    noticed: bool
    strange: float
    accuracy: float  # on all target images

    @property
    def ranged(self) -> bool:
        return self.supported and not self.noticed and self.strange <= STRANGE

    @property
    def holds(self) -> bool:
        return abs(self.expected - self.accuracy) <= estimate.HALF_WIDTH


def claim(task: Task, told: Tensor | None) -> Claim:
    """As in run.finish, for `--effort instant`."""
    domains, x, z = task.domains, task.domains.source.features, task.domains.target.features
    evidence = Evidence.of(domains, task.classes, task.leading, pretrained=True, told=told, notice=True)
    numbering = Numbering.of(evidence.occurs, domains.source_labels)
    rows, classes = numbering.source, numbering.classes
    y, beside = numbering.new_labels(domains.source_labels[rows]), None if numbering.whole else x[numbering.beside]
    of_source = Statistics.of(x)
    start = fit_probe(of_source.standardised(x), F.one_hot(domains.source_labels, task.classes).to(x), LOOSE)
    start = Probe(start.weight[:, classes], start.bias[classes])
    begin = Domains(scored(x[rows], start, of_source), y, scored(z, start, of_source), beside=beside)
    labels = label_target(begin, classes=len(classes), leading=task.leading).probabilities
    probe, _, of_target = probe_on_both(begin, labels)
    end = Domains(scored(x[rows], probe, of_target), y, scored(z, probe, of_target))
    before, after = impression(begin), impression(end)
    verdict = guard.decide(guard.judge_adapted(before, after, evidence))
    support, stayed = evidence.support(after.predicted), evidence.stayed(after.predicted, before.predicted)
    enough = estimate.measurable(evidence.source_labels, len(z)) and guard.supported(support)
    return Claim(
        estimate.expected_accuracy(support, stayed, evidence),
        verdict.kind == "better" and enough,
        bool(evidence.noticed),
        float(evidence.strange),
        share(classes[after.predicted] == task.truth),
    )


def scored(x: Tensor, probe: Probe, statistics: Statistics) -> Encoded:
    return Encoded(x, statistics.standardised(x) @ probe.weight + probe.bias)


def claims(domains: dict[str, Features]) -> dict[str, list[Claim]]:
    found = {}
    for kind in (*CLOSED, "partial", "partial, told", *WITH_OTHERS):
        made = []
        for name, task in tasks(domains, kind.removesuffix(", told")):
            made.append(claim(task, there_in(task) if kind.endswith("told") else None))
            print(kind, name, made[-1], flush=True)
        found[kind] = made = [each for each in made if each.supported]
        kept = [each for each in made if each.ranged]
        held, kept_held = (sum(each.holds for each in some) for some in (made, kept))
        print(f"{kind}: {len(made)} ranges, {held} held; {len(kept)} not withheld, {kept_held} held", flush=True)
    return found


def strange_cuts(found: dict[str, dict[str, list[Claim]]]) -> None:
    """For each data set, the cut of strangeness with the largest sum of two shares in the others: of ranges of closed
    tasks that are kept, and of those of open tasks that are withheld."""
    for data, own in found.items():
        closed, opened = (
            np.array([each.strange for name in found if name != data for kind in kinds for each in found[name][kind]])
            for kinds in (CLOSED, WITH_OTHERS)
        )
        values = np.unique(np.concatenate([closed, opened]))
        cuts = (values[1:] + values[:-1]) / 2
        sums = np.array([(closed <= cut).mean() + (opened > cut).mean() for cut in cuts])
        best = cuts[sums > sums.max() - 1e-9]
        cut = best[len(best) // 2]
        kept = {kind: sum(each.strange <= cut for each in some) for kind, some in own.items()}
        print(f"{data}: cut of the others {cut:.3f}; ranges {[(kind, len(x)) for kind, x in own.items()]}, kept {kept}")


class Constants(NamedTuple):
    """Those of pairing.occurring, their names in lower case."""

    steady: float
    most: float
    enough_images: int
    uneven: float
    em_steps: int


class Trial(NamedTuple):
    """The effect of some constants on one data set."""

    partial: float  # mean accuracy, less that of today's labels
    thin: float
    closed: int  # closed tasks on which the rule fires

    @property
    def harmless(self) -> bool:
        return not self.closed and self.thin >= -0.1


GRID = [
    Constants(*each) for each in itertools.product((0.1, 0.2, 0.3), (0.3, 0.4, 0.5), (10, 20), (0.55, 0.65), (4, 7, 15))
]


def trials_of(domains: dict[str, Features]) -> dict[Constants, Trial]:
    gains: dict[Constants, dict[str, list[float]]] = {each: defaultdict(list) for each in GRID}
    for kind in KNOWN_ALONE:
        for name, task in tasks(domains, kind):
            start, known = start_of(task), {}
            today = correct(labelled(start, None), task.truth)
            with cached_steps():
                for each in GRID:
                    absent = absent_by(each, start)
                    key = None if absent is None else tuple(absent.tolist())
                    if key not in known:
                        known[key] = 0.0 if absent is None else correct(labelled(start, ~absent), task.truth) - today
                    gains[each][kind].append(known[key])
                    gains[each]["fired " + kind].append(absent is not None)
            print(kind, name, f"{len(known)} class sets", flush=True)
    return {
        each: Trial(float(np.mean(found["partial"])), float(np.mean(found["thin"])), int(sum(found["fired closed"])))
        for each, found in gains.items()
    }


def absent_by(constants: Constants, start: Start) -> Tensor | None:
    with ExitStack() as stack:
        for name, value in constants._asdict().items():
            stack.enter_context(patch.object(occurring, name.upper(), value))
        return absent_classes(start)


@contextmanager
def cached_steps() -> Iterator[None]:
    """Many constants share the path and the rare classes, which take most of the time."""
    found: dict[tuple[float, bytes], Tensor] = {}
    path, rare = occurring.unsteady, occurring.rare

    def cached_path(start: Start, p: Tensor) -> Tensor:
        key = occurring.STEADY, p.numpy().tobytes()
        if key not in found:
            found[key] = path(start, p)
        return found[key]

    def cached_rare(p: Tensor, prior: Tensor, gone: Tensor) -> Tensor:
        key = -occurring.EM_STEPS, gone.numpy().tobytes()
        if key not in found:
            found[key] = rare(p, prior, gone)
        return found[key]

    with patch.object(occurring, "unsteady", cached_path), patch.object(occurring, "rare", cached_rare):
        yield


def rotation(trials: dict[str, dict[Constants, Trial]]) -> None:
    """For each data set, the constants that are harmless on the others and bring most there."""
    ours = Constants(*(getattr(occurring, name.upper()) for name in Constants._fields))
    for data, own in trials.items():
        others = [each for name, each in trials.items() if name != data]
        gain = {each: sum(found[each].partial for found in others) for each in GRID}
        allowed = [each for each in GRID if all(found[each].harmless for found in others)]
        best = max(gain[each] for each in allowed)
        print(f"{data}: ours {own[ours]}; by the others:")
        for each in allowed:
            if gain[each] > best - 1e-6:
                print(f"    {each}: {own[each]}", flush=True)


Means = dict[str, dict[str, list[float]]]  # row, column, a number for each task


def new_table() -> Means:
    return defaultdict(lambda: defaultdict(list))


def add(table: Means, column: str, name: str, rows: dict[str, float]) -> None:
    for row, value in rows.items():
        table[row][column].append(value)
    print(column, name, *(f"{row} {value:.1f}" for row, value in rows.items()), sep="; ", flush=True)


def print_table(table: Means) -> None:
    columns = list(dict.fromkeys(column for row in table.values() for column in row))
    print("|  |", " | ".join(columns), "|\n|---|", "---|" * len(columns), sep="")
    for row, values in table.items():
        cells = (f"{np.mean(values[column]):.1f}" if column in values else "" for column in columns)
        print(f"| {row} |", " | ".join(cells), "|")


TABLES: dict[str, Callable[[dict[str, Features]], Any]] = {
    "partial": partial,
    "asked": asked,
    "open": open_set,
    "labels": to_label,
    "estimate": claims,
    "constants": trials_of,
}
OF_ALL_DATA: dict[str, Callable[[dict[str, Any]], None]] = {"estimate": strange_cuts, "constants": rotation}


def main() -> None:
    parser = feature_parser(__doc__, "+")
    parser.add_argument("--table", choices=TABLES, default="partial")
    arguments = parser.parse_args()
    found = {}
    for data in arguments.data:
        print(data.name, flush=True)
        found[data.name] = TABLES[arguments.table](encoded_domains(data, arguments))
    if arguments.table in OF_ALL_DATA and len(found) > 1:
        OF_ALL_DATA[arguments.table](found)


if __name__ == "__main__":
    main()
