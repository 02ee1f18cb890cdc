"""Helpers that several test files share."""

import pytest
import torch


def from_authors_names(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The authors' parameter names -> ours."""
    ours = {"base.": "backbone.", "bottleneck.": "head.neck.", "classifier.": "head.classifier."}
    return {new + k.removeprefix(old): v for k, v in state.items() for old, new in ours.items() if k.startswith(old)}


def devices() -> list:
    """The CPU, and a GPU where there is one; the GPU's case is skipped elsewhere, saying why."""
    no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
    return ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, no_gpu])]
