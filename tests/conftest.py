"""Fixtures that several test files share."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import numpy as np
import pytest
import torch
from timm.models import VisionTransformer

import commands
from cdtrans.network.network import Head, Network
from cdtrans.run.pipeline import adapt
from cdtrans.runtime.signals import StopSignals
from cdtrans.trust import estimate
from support import from_authors_names
from tiny_task import CLASSES, Task, make_task

LONGEST = (  # files, in seconds of a process, the longest first
    "test_resume.py",
    "test_contract.py",
    "test_benchmark.py",
    "test_noise.py",
    "test_ablation.py",
    "test_demo.py",
    "test_verbs.py",
    "test_pipeline.py",
    "test_browser.py",
    "test_portable.py",
    "test_fused.py",
)
GOLDEN = Path(__file__).parent / "golden"
hypothesis.settings.register_profile("cdtrans", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("cdtrans")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what runs in the background
os.fsync = lambda file: None  # no test cuts the power
torch.set_num_threads(1)  # tensors are small here, and on a busy machine threads wait for each other most of the time


class Finished(NamedTuple):
    """The value of the fixture `finished`."""

    task: Task
    run: Path
    answers: Path  # a list 'path label' of every target image


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whoever uses the finished run needs a training run. The longest files come first, so that no process is left
    with one of them at the end."""
    for item in items:
        if "finished" in getattr(item, "fixturenames", ()):
            item.add_marker("slow")
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


def pytest_runtest_setup(item: pytest.Item) -> None:
    commands.may_be_slow = item.get_closest_marker("slow") is not None


@pytest.fixture(autouse=True)
def _no_signal_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that one test sent must not stop the training of another."""
    monkeypatch.setattr(StopSignals, "received", None)


@pytest.fixture(autouse=True)
def _private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or fills the user's own cache of decoded images."""
    monkeypatch.setenv("CDTRANS_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def golden() -> Callable[[str], dict[str, torch.Tensor]]:
    """golden("pseudo") -> the arrays that the authors' code gave, as tensors."""

    def read(name: str) -> dict[str, torch.Tensor]:
        with np.load(GOLDEN / f"{name}.npz") as arrays:
            return {key: torch.as_tensor(arrays[key]) for key in arrays.files}

    return read


@pytest.fixture
def tiny(golden: Callable[[str], dict[str, torch.Tensor]]) -> tuple[Network, dict[str, torch.Tensor]]:
    """The golden tiny model in float64 with the authors' initial weights, and all golden arrays."""
    g = golden("cdtrans_tiny")
    vit = VisionTransformer(
        img_size=32, patch_size=8, embed_dim=32, depth=3, num_heads=2, mlp_ratio=4, num_classes=0, qkv_bias=True
    )
    model = Network(vit, Head(32, 5, "batchnorm")).double()
    model.load_state_dict(from_authors_names({k[3:]: v for k, v in g.items() if k.startswith("sd/")}))
    return model, g


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A finished run of the tiny task and the true labels of its target; tests must leave it as it is."""
    task = make_task(tmp_path_factory.mktemp("finished"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimate, "LEAST_IMAGES", 5)  # it has a range for the accuracy, although it is tiny
        patch.setattr(estimate, "PER_CLASS", 5)
        run = adapt(source=task.source, target=task.target, out=task.folder / "run", config=task.config, quiet=True).run
    answers = task.folder / "answers.txt"
    targets = sorted(task.target.iterdir())
    answers.write_text("".join(f"target/{p.name} {CLASSES[int(p.stem) % len(CLASSES)]}\n" for p in targets))
    return Finished(task, run, answers)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium; the test is skipped where it is missing."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as tools:
        started = tools.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield started
        started.close()
