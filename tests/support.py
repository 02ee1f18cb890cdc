"""Helpers that several test files share."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from cdtrans.errors import CdtransError


def from_authors_names(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The authors' parameter names -> ours."""
    ours = {"base.": "backbone.", "bottleneck.": "head.neck.", "classifier.": "head.classifier."}
    return {new + k.removeprefix(old): v for k, v in state.items() for old, new in ours.items() if k.startswith(old)}


def devices() -> list:
    """The CPU, and a GPU where there is one; the GPU's case is skipped elsewhere, saying why."""
    no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
    return ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, no_gpu])]


def says(text: str, *words: str) -> bool:
    """Whether a text has all of these key words, in any order and case: what is meant, not how it is put. The name of
    the test in the path of its own folder does not count."""
    own = re.sub(r"/pytest-of-[^/]+/pytest-\d+(/popen-gw\d+)?/[^/'\s]+", "", text)
    missing = [word for word in words if word.lower() not in (text if "/" in word else own).lower()]
    assert not missing, f"{missing} not in: {text}"
    return True


@contextmanager
def error_says(*words: str) -> Iterator[None]:
    """What happens here is refused in one line that has these key words."""
    with pytest.raises(CdtransError) as caught:
        yield
    assert says(str(caught.value), *words)
    assert "\n" not in str(caught.value)
