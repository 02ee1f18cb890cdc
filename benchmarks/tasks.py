"""Shared parts of the benchmarks on data sets: flags, tasks, features of a frozen backbone, verbs in this process.

A data set is a folder that holds a folder of class folders for each domain (or DOMAIN/images)."""

import argparse
import itertools
import multiprocessing
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cdtrans.cli import app as entry
from cdtrans.config import Resolved, make_config, read_recipe
from cdtrans.inputs.decode import decode_domain
from cdtrans.inputs.scan import scan_labelled
from cdtrans.methods.base import Round, Sizes
from cdtrans.methods.instant import Instant
from cdtrans.network.encoding import Encoded, Encoder
from cdtrans.network.weights import make_card
from cdtrans.pairing.pairs import Domains
from cdtrans.run.pipeline import resolve
from cdtrans.run.stage1 import initial_network
from cdtrans.runtime.screen import Screen


class Features(NamedTuple):
    """A domain, as a frozen backbone sees it."""

    x: Tensor  # [N, D]
    labels: Tensor  # [N]
    leading: int  # features of the last two blocks


def parser(about: str | None, data: str | None = None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("data", type=Path, nargs=data)
    made.add_argument("--backbone", default="deit_tiny_patch16_224")
    made.add_argument("--weights", type=Path)
    return made


def feature_parser(about: str | None, data: str | None = None) -> argparse.ArgumentParser:
    made = parser(about, data)
    made.add_argument("--features", type=Path, help="keep the features here, and take them from here")
    return made


def run_parser(about: str | None) -> argparse.ArgumentParser:
    made = parser(about)
    made.add_argument("--tasks", nargs="+", help="SOURCE:TARGET; all of them unless given")
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--jobs", type=int, default=1)
    return made


def tasks_of(data: Path, named: Iterable[str] | None) -> list[tuple[str, str]]:
    """Pairs of domains: those that are named, or all."""
    domains = [path.name for path in folders_in(data)]
    pairs = (task.split(":") for task in named or ())
    return [(source, target) for source, target in pairs] or list(itertools.permutations(domains, 2))


def place(data: Path, domain: str) -> Path:
    return data / domain / "images" if (data / domain / "images").is_dir() else data / domain


def call(words: list[str]) -> int:
    """The verb of the program, in this process: starting one for each run would take longer than many runs."""
    sys.argv = ["cdtrans", *words]
    try:
        entry.run_program()
    except SystemExit as end:
        return int(end.code or 0)
    raise AssertionError("the program ends with an exit code")


def in_processes(jobs: int, work: Callable[..., None], calls: Iterable[tuple[Any, ...]]) -> None:
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        for done in [pool.submit(work, *arguments) for arguments in calls]:
            done.result()


def encoded_domains(data: Path, arguments: argparse.Namespace, **settings: Any) -> dict[str, Features]:
    """The features of every domain of a data set; each is encoded once."""
    settings |= {"backbone": arguments.backbone, "weights": arguments.weights and str(arguments.weights)}
    config = resolve(make_config(read_recipe("best") | settings))
    store = arguments.features and arguments.features / data.name
    return {path.name: _features_of(place(data, path.name), path.name, config, store) for path in folders_in(data)}


def _features_of(folder: Path, name: str, config: Resolved, store: Path | None) -> Features:
    domain, screen = scan_labelled(folder, None), Screen(quiet=True)
    card = make_card(config, domain.classes, stage="source", epoch=0)
    network, labels = initial_network(config, card), torch.tensor(domain.labels)
    kept = store and store / f"{name}.npy"
    if kept and kept.exists():
        return Features(torch.from_numpy(np.load(kept)), labels, network.leading)
    decoded, device = decode_domain(domain, config, screen, name), torch.device(config.device)
    encoder = Encoder(network.to(device), config, screen, {})
    found = encoder(decoded.images(card, device), name).features.cpu()
    if kept:
        kept.parent.mkdir(parents=True, exist_ok=True)
        np.save(kept, found.numpy())
    return Features(found, torch.tensor(decoded.domain.labels), network.leading)


def folders_in(data: Path) -> list[Path]:
    return sorted(path for path in data.iterdir() if path.is_dir())


def class_count(domains: dict[str, Features]) -> int:
    return 1 + max(int(domain.labels.max()) for domain in domains.values())


def thinned(labels: Tensor, ratio: float, seed: int) -> Tensor:
    """Rows of a subset whose classes shrink geometrically to 1 / ratio, in a random order of the classes."""
    rng = np.random.default_rng(seed)
    classes = int(labels.max()) + 1
    rows = []
    for rank, k in enumerate(rng.permutation(classes)):
        members = np.flatnonzero(labels.numpy() == k)
        rows.append(rng.choice(members, max(1, round(len(members) * ratio ** (-rank / (classes - 1)))), replace=False))
    return torch.from_numpy(np.sort(np.concatenate(rows)))


def both_domains(x: Tensor, y: Tensor, z: Tensor, classes: int) -> Domains:
    return Domains(Encoded(x, torch.zeros(len(x), classes)), y, Encoded(z, torch.zeros(len(z), classes)))


def served_logits(x: Tensor, y: Tensor, z: Tensor, classes: int, leading: int) -> Tensor:
    """Logits of the target by the classifier that the instant effort serves."""
    method = Instant(_Stand(x.shape[1], leading), None, Sizes(classes, len(x), len(z)))  # type: ignore[arg-type]
    method.plan(both_domains(x, y, z, classes), Round(1, 1, 1), torch.Generator())
    with torch.no_grad():
        return method.probe.eval().classify(z).logits


class _Stand(torch.nn.Module):
    """In place of a network whose features are there already."""

    def __init__(self, dim: int, leading: int) -> None:
        super().__init__()
        self.dim, self.leading = dim, leading
