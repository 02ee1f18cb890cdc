"""The streamed search gives what the whole similarity matrix would."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from hypothesis.extra.numpy import arrays

from cdtrans.pairing.neighbours import SEGMENT, SPLIT_ERROR, bfloat16_parts, sweep, sweep_error, two_way, unit_rows
from support import devices

CASES = ("noise", "clusters", "missing_classes", "empty_center")


def dense(source: torch.Tensor, target: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """numpy's argmax takes the first of equals, by definition."""
    similarity = source.cpu().numpy() @ target.cpu().numpy().T
    return similarity.argmax(axis=1), similarity.argmax(axis=0)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("case", CASES)
def test_equals_the_authors(golden, case: str, device: str) -> None:
    g = golden("pseudo")
    source, target = (unit_rows(g[f"{case}/feat_{x}"].to(device)) for x in "st")
    torch.testing.assert_close(source.cpu(), g[f"{case}/norm_feat_s"], atol=1e-6, rtol=0)
    found = two_way(source, target)
    assert found.target_of_source.tolist() == g[f"{case}/nn_target_of_source"].flatten().tolist()
    assert found.source_of_target.tolist() == g[f"{case}/nn_source_of_target"].flatten().tolist()


small_integers = st.integers(-2, 2).map(float)  # products and sums are exact, so ties are real ties
sizes = st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(1, 4))


@pytest.mark.slow
@given(data=st.data(), shape=sizes, tile=st.integers(1, 13))
@settings(max_examples=200, deadline=None)
def test_equals_the_dense_matrix_with_ties_and_any_tile(data, shape: tuple[int, int, int], tile: int) -> None:
    ns, nt, d = shape
    source, target = (
        torch.from_numpy(data.draw(arrays(np.float32, (n, d), elements=small_integers))) for n in (ns, nt)
    )
    rows, columns = dense(source, target)
    found = two_way(source, target, tile=tile)
    assert found.target_of_source.tolist() == rows.tolist()
    assert found.source_of_target.tolist() == columns.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("device", devices())
@given(seed=st.integers(0, 10**6), tile=st.integers(1, 80))
@settings(max_examples=30, deadline=None)
def test_duplicates_and_near_ties_are_settled_exactly(device: str, seed: int, tile: int) -> None:
    """float32 products of equal rows can differ with their place in a block, those of near ones in their order. For
    small tiles there are few images, since 3500 tiles would take seconds."""
    generator = torch.Generator().manual_seed(seed)
    n = 10 if tile > 7 else 2
    source, target = (torch.randn(images, 48, generator=generator) for images in (7 * n, 5 * n))
    for x in (source, target):
        x[-n:] = x[:n]  # duplicates
        x[2 * n : 3 * n] = x[n : 2 * n] * (1 + 1e-7)  # as near as float32 allows
    similarity = (source.double()[:, None] * target.double()).sum(dim=2).numpy()
    found = two_way(source.to(device), target.to(device), tile=tile)
    assert found.target_of_source.tolist() == similarity.argmax(axis=1).tolist()
    assert found.source_of_target.tolist() == similarity.argmax(axis=0).tolist()


@pytest.mark.parametrize("device", devices())
def test_a_collapsed_model_does_not_fill_the_memory(device: str) -> None:
    same = torch.ones(3000, 8, device=device)
    found = two_way(same, same, tile=1000)
    assert found.target_of_source.tolist() == found.source_of_target.tolist() == [0] * 3000


def test_the_matrix_is_never_held_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0
    plain = torch.Tensor.__matmul__

    def watched(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        out = plain(a, b)
        largest = max(largest, out.numel())
        return out

    monkeypatch.setattr(torch.Tensor, "__matmul__", watched)
    two_way(torch.randn(500, 4), torch.randn(300, 4), tile=SEGMENT)
    assert 0 < largest <= SEGMENT**2


@given(data=st.data(), shape=sizes)
@settings(deadline=None)
def test_two_bfloat16_parts_leave_out_no_more_than_is_allowed_for(data, shape: tuple[int, int, int]) -> None:
    """In exact arithmetic: what the GPU's sums round is measured on one, below."""
    ns, nt, d = shape
    numbers = st.floats(-100, 100, width=32).map(lambda x: x if abs(x) > 1e-30 else 0.0)  # no denormal part
    x, y = (torch.from_numpy(data.draw(arrays(np.float32, (n, d), elements=numbers))) for n in (ns, nt))
    (x_high, x_low), (y_high, y_low) = ((part.double() for part in bfloat16_parts(z)) for z in (x, y))
    swept = x_high @ y_high.T + x_high @ y_low.T + x_low @ y_high.T
    lengths = torch.linalg.vector_norm(x.double(), dim=1)[:, None] * torch.linalg.vector_norm(y.double(), dim=1)
    error = (swept - x.double() @ y.double().T).abs()
    assert (error <= SPLIT_ERROR * lengths).all()


@pytest.mark.slow
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dim", [3, 384, 768])
def test_a_sweep_is_as_near_as_it_says(device: str, dim: int) -> None:
    generator = torch.Generator(device).manual_seed(dim)
    source, target = (unit_rows(torch.randn(4096, dim, device=device, generator=generator)) for _ in "st")
    target[:2048] = unit_rows(source[:2048] + 0.01 * target[:2048])  # large similarities too
    error = (sweep(source, target).double() - source.double() @ target.double().T).abs().max()
    assert error < 0.5 * sweep_error(source, target)
