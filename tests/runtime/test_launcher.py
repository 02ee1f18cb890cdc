"""What processes know about each other from their launcher."""

import pytest
import torch

from cdtrans.runtime import launcher, processors
from cdtrans.runtime.ranks import take_gpu


def test_alone_and_under_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    known = launcher.rank, launcher.world, launcher.local_rank, launcher.local_world
    assert [ask() for ask in known] == [0, 1, 0, 1]
    for name, value in (("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    assert [ask() for ask in known] == [5, 8, 1, 4]


@pytest.mark.parametrize("rank", ["1", ""])
def test_a_rank_without_others_is_rank_0(monkeypatch: pytest.MonkeyPatch, rank: str) -> None:
    """Such a variable can be left over in a shell or a container."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "")
    assert (launcher.rank(), launcher.world()) == (0, 1)


@pytest.mark.parametrize(("processes", "share"), [("1", 12), ("4", 3), ("5", 2), ("64", 1)])
def test_processes_of_a_machine_share_its_processors(monkeypatch, processes: str, share: int) -> None:
    monkeypatch.setattr(processors, "processor_count", lambda: 12)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    assert processors.processor_share() == share


def test_processes_of_a_machine_take_its_gpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    for rank in range(4):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        take_gpu()
    assert taken == [0, 1, 0, 1]
