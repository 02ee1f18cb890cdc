"""How work is shared out among ranks; end_to_end/test_ranks.py starts real ones."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st

import cdtrans
from cdtrans.runtime import ranks
from support import raises
from tiny_task import make_task


def test_alone_and_under_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (ranks.launched_rank(), ranks.launched_world()) == (0, 1)
    for name, value in (("RANK", "5"), ("WORLD_SIZE", "8")):
        monkeypatch.setenv(name, value)
    assert (ranks.launched_rank(), ranks.launched_world()) == (5, 8)


@pytest.mark.parametrize("rank", ["1", ""])
def test_a_rank_without_others_is_rank_0(monkeypatch: pytest.MonkeyPatch, rank: str) -> None:
    """Such a variable can be left over in a shell or a container."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "")
    assert (ranks.launched_rank(), ranks.launched_world()) == (0, 1)


@given(count=st.integers(0, 500), world=st.integers(1, 20), start=st.integers(0, 1000))
def test_the_parts_of_a_batch_cover_it_once_and_in_order(count: int, world: int, start: int) -> None:
    taken = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "world", lambda: world)
        for number in range(world):
            patch.setattr(ranks, "rank", lambda number=number: number)
            taken.append(range(start + count + 7)[ranks.part(slice(start, start + count))])
    assert [i for part in taken for i in part] == list(range(start, start + count))
    assert max(map(len, taken)) - min(map(len, taken)) <= 1


def test_one_rank_alone_is_the_plain_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with ranks.joined("auto"):
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


class Group:
    """The stand-in for a launcher's processes, of which this is rank 0, and for this machine's GPUs."""

    def __init__(self, patch: pytest.MonkeyPatch, *, processes: int, gpus: int) -> None:
        self.store, self.backends = dist.HashStore(), []
        for name, value in {"RANK": 0, "WORLD_SIZE": processes, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": processes}.items():
            patch.setenv(name, str(value))
        patch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        patch.setattr(torch.cuda, "device_count", lambda: gpus)
        patch.setattr(torch.cuda, "set_device", lambda number: None)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"GPU-{device.index}"))
        patch.setattr(
            sys.modules["torch.distributed.rendezvous"], "rendezvous", lambda url: iter([(self.store, 0, processes)])
        )
        patch.setattr(dist, "init_process_group", lambda backend, **how: self.backends.append(backend))
        patch.setattr(dist, "destroy_process_group", lambda: None)

    def others_take(self, *gpus: int) -> None:
        for number, gpu in enumerate(gpus, start=1):
            self.store.set(f"gpu/{number}", f"GPU-{gpu}")


def test_a_run_with_more_processes_than_gpus_is_refused_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """NCCL cannot do it, and says so only in the middle of the run."""
    task = make_task(tmp_path)
    Group(monkeypatch, processes=4, gpus=1).others_take(0, 0, 0)
    with raises("too-few-gpus"):
        cdtrans.adapt(task.source, task.target, out=tmp_path / "run", config=task.config, device="auto", quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("device", "gpus", "taken_by_the_other", "backend"),
    [
        ("auto", 2, 1, "nccl"),
        ("auto", 1, 5, "nccl"),  # each sees only its own, as by Slurm's --gpus-per-task: GPU 0 is another one for each
        ("cpu", 1, 0, "gloo"),
    ],
)
def test_processes_with_a_gpu_each_use_nccl_and_others_gloo(
    monkeypatch: pytest.MonkeyPatch, device: str, gpus: int, taken_by_the_other: int, backend: str
) -> None:
    group = Group(monkeypatch, processes=2, gpus=gpus)
    group.others_take(taken_by_the_other)
    with ranks.joined(device):
        assert group.backends == [backend]


def test_a_gpu_named_by_its_number_is_one_for_all_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Group(monkeypatch, processes=2, gpus=2).others_take(1)
    with raises("one-gpu-for-ranks"), ranks.joined("cuda:1"):
        pass


def test_processes_of_a_machine_take_its_gpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    Group(monkeypatch, processes=4, gpus=2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    for rank in range(4):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        with ranks.joined("cpu"):
            pass
    assert taken == [0, 1, 0, 1]


def test_several_processes_on_mps_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Group(monkeypatch, processes=2, gpus=0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    with raises("ranks-on-mps"), ranks.joined("mps"):
        pass
