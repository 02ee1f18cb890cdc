"""How work is shared out among ranks; end_to_end/test_ranks.py starts real ones."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cdtrans.runtime import ranks


def parts_of(count: int, world: int, start: int | None = None) -> list[slice]:
    """What each rank of so many takes of `count` things, or of a batch of that length."""
    parts = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "world", lambda: world)
        for number in range(world):
            patch.setattr(ranks, "rank", lambda number=number: number)
            parts.append(ranks.share(count) if start is None else ranks.part(slice(start, start + count)))
    return parts


@given(count=st.integers(0, 500), world=st.integers(1, 20))
def test_the_shares_cover_everything_once_and_in_order(count: int, world: int) -> None:
    taken = [list(range(count))[part] for part in parts_of(count, world)]
    assert [i for part in taken for i in part] == list(range(count))
    assert max(map(len, taken)) - min(map(len, taken)) <= 1


@given(count=st.integers(0, 500), world=st.integers(1, 20), start=st.integers(0, 1000))
def test_the_parts_of_a_batch_cover_it_once_and_in_order(count: int, world: int, start: int) -> None:
    everything = range(start + count + 7)
    taken = [everything[part] for part in parts_of(count, world, start)]
    assert [i for part in taken for i in part] == list(range(start, start + count))


def test_one_rank_alone_is_the_plain_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with ranks.joined():
        assert (ranks.rank(), ranks.world(), ranks.is_main()) == (0, 1, True)
        ranks.barrier()
    assert ranks.share(5) == slice(0, 5)
    assert ranks.part(slice(3, 8)) == slice(3, 8)


def test_on_one_rank_nothing_is_gathered_or_averaged() -> None:
    x = torch.randn(3, 2, requires_grad=True)
    assert ranks.gather(x) is x
    weights = [torch.randn(2, requires_grad=True), torch.randn(2, requires_grad=True)]
    weights[0].grad = torch.tensor([1.0, 2.0])
    ranks.average_gradients(weights)
    assert weights[0].grad.tolist() == [1.0, 2.0]
    assert weights[1].grad is None
