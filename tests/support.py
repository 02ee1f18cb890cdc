"""Helpers that several test files share."""

import io
import re
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.models import VisionTransformer
from torch import nn

from cdtrans.errors import CdtransError
from cdtrans.methods.base import Batch, Sizes
from cdtrans.network import blocks
from cdtrans.network.network import Head, Network
from cdtrans.runtime.screen import Screen


def from_authors_names(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The authors' parameter names -> ours."""
    ours = {"base.": "backbone.", "bottleneck.": "head.neck.", "classifier.": "head.classifier."}
    return {new + k.removeprefix(old): v for k, v in state.items() for old, new in ours.items() if k.startswith(old)}


def tiny_method(kind: Any, *, classes: int = 3, depth: int = 1, **options: Any) -> Any:
    """A method in training mode on a ViT of one block, or more, with 16 features."""
    torch.manual_seed(0)
    vit = VisionTransformer(img_size=16, patch_size=8, embed_dim=16, depth=depth, num_heads=2, num_classes=0)
    network = Network(vit, Head(16, classes, "batchnorm"))
    return kind(network, kind.Options(**options), Sizes(classes, 10, 10)).train()


def tiny_batch(images: int = 6, classes: int = 3) -> Batch:
    """A batch for it."""
    torch.manual_seed(1)
    x, y = torch.randn(2, images, 3, 16, 16), torch.arange(images) % classes
    return Batch(x[0], y, x[1], torch.zeros_like(y), torch.arange(images), torch.ones(images))


class Updates:
    """In place of the optimiser: the modules and the loss of each update, each of whose parameters gets a gradient."""

    def __init__(self, method: nn.Module) -> None:
        self.names = {id(p): name for name, p in method.named_parameters()}
        self.modules: list[set[str]] = []
        self.losses: list[float] = []

    def __call__(self, loss: torch.Tensor, parameters: Sequence[torch.Tensor] | None = None) -> None:
        assert parameters is not None
        gradients = torch.autograd.grad(loss, list(parameters), allow_unused=True)
        assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
        self.modules.append({self.names[id(p)].split(".")[0] for p in parameters})
        self.losses.append(float(loss.detach()))


def devices() -> list:
    """The CPU, and a GPU where there is one; the GPU's case is skipped elsewhere, saying why."""
    no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
    return ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, no_gpu])]


class Notes(Screen):
    """A screen that keeps its lines, the warnings among them, and its results."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.lines: list[str] = []
        self.warnings: list[str] = []  # type: ignore[assignment]
        self.results: list[object] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def warn(self, text: str) -> None:
        self.lines.append(text)
        self.warnings.append(text)

    def result(self, text: object) -> None:
        self.results.append(text)


def says(text: str, *words: str) -> bool:
    """Whether a text has all of these key words, in any order and case: what is meant, not how it is put. The name of
    the test in the path of its own folder does not count."""
    own = re.sub(r"/pytest-of-[^/]+/pytest-\d+(/popen-gw\d+)?/[^/'\s]+", "", text)
    missing = [word for word in words if word.lower() not in (text if "/" in word else own).lower()]
    assert not missing, f"{missing} not in: {text}"
    return True


@contextmanager
def raises(code: str, kind: type[CdtransError] = CdtransError) -> Iterator[pytest.ExceptionInfo[CdtransError]]:
    """An error with this code, in one line that ends as a sentence does."""
    with pytest.raises(kind) as caught:
        yield caught
    text = str(caught.value)
    assert caught.value.code == code, text
    assert "\n" not in text
    assert text.endswith((".", "?")), text


@contextmanager
def error_says(*words: str) -> Iterator[None]:
    """An error in one line that has these words."""
    with pytest.raises(CdtransError) as caught:
        yield
    assert says(str(caught.value), *words)
    assert "\n" not in str(caught.value)


def make_tar(file: Path, *names: str, content: bytes = b"x" * 700, form: int = tarfile.PAX_FORMAT) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w", format=form) as tar:
        for name in names:
            add_member(tar, name, content)
    return file


def add_member(tar: tarfile.TarFile, name: str, content: bytes = b"", **facts: Any) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    for fact, value in facts.items():
        setattr(member, fact, value)
    tar.addfile(member, io.BytesIO(content))


def small_gpu(monkeypatch: pytest.MonkeyPatch, most: int, *, in_backward: bool = False) -> list[int]:
    """A stand-in for a GPU that has no memory for more than `most` images in a block of a ViT; with `in_backward` that
    shows only in the backward pass. Returns the numbers of images of the calls so far."""
    calls: list[int] = []
    run_block = blocks.run_block

    def out_of_memory(*anything: Any) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

    def limited(block: Any, stream: Any, *passed: Any) -> Any:
        calls.append(len(stream.x))
        out = run_block(block, stream, *passed)
        if calls[-1] > most and in_backward and out.x.requires_grad:
            out.x.register_hook(out_of_memory)
        elif calls[-1] > most and not in_backward:
            out_of_memory()
        return out

    monkeypatch.setattr(blocks, "run_block", limited)
    return calls
