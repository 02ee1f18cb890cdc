"""Images decoded by another process while torch is imported."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import timm

from cdtrans.config import Config, read_recipe
from cdtrans.inputs.ahead import decoding_ahead, size_ahead
from cdtrans.inputs.domains import scan_unlabelled
from cdtrans.inputs.store import list_stores
from cdtrans.network.backbone import native_crop
from cdtrans.run.resolve import resolve
from tiny_task import make_target

# A process without torch, which decodes ahead until so many images are done, and then looks whether a child is left.
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from cdtrans.config import Config
from cdtrans.inputs.ahead import decoding_ahead
from cdtrans.inputs.domains import scan_unlabelled
from cdtrans.inputs.store import list_stores
cache, images, done = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
if "ignoring" in sys.argv:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # as some supervisors leave it: a child that ends is gone at once
print("said before", end="")  # still buffered when the child is forked
with decoding_ahead(Config(crop=16, cache=str(cache)), scan_unlabelled(images)):
    end = time.monotonic() + 30
    while sum(s.images for s in list_stores(cache)) < done and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(float(sys.argv[4]))
try:
    os.waitpid(-1, 0)
except ChildProcessError:
    print(", no child left", "torch" in sys.modules)
"""


def decode_ahead(cache: Path, images: Path, done: int, seconds_more: float = 0, *more: str) -> str:
    command = [sys.executable, "-c", SCRIPT, str(cache), str(images), str(done), str(seconds_more), *more]
    buffered = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=buffered).stdout


@pytest.mark.slow
def test_the_store_is_filled_meanwhile(tmp_path: Path) -> None:
    images = make_target(tmp_path / "images", each=3)
    (images / "bad.png").write_bytes(b"no image")
    said = decode_ahead(tmp_path / "cache", images, done=9, seconds_more=0.5)  # time for it to end by itself
    assert said == "said before, no child left False\n"
    (store,) = list_stores(tmp_path / "cache")
    assert (store.root, store.size, store.images) == (images, 18, 9)


@pytest.mark.slow
def test_nobody_need_wait_for_the_process(tmp_path: Path) -> None:
    images = make_target(tmp_path / "images", each=1)
    said = decode_ahead(tmp_path / "cache", images, 3, 0.5, "ignoring")
    assert said == "said before, no child left False\n"


@pytest.mark.slow
def test_it_ends_with_the_imports_however_much_is_left(tmp_path: Path) -> None:
    images = make_target(tmp_path / "images", each=400)
    assert decode_ahead(tmp_path / "cache", images, done=1) == "said before, no child left False\n"
    (store,) = list_stores(tmp_path / "cache")
    assert 0 < store.images < 1200


@pytest.mark.parametrize("why", ["torch is there", "another thread", "streamed", "unknown size", "nothing to decode"])
def test_no_process_is_forked_where_that_is_of_no_use_or_not_safe(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forked = []

    def fork() -> int:
        forked.append(True)
        raise InterruptedError

    monkeypatch.setattr("os.fork", fork)
    count, of_the_runner = threading.active_count, threading.active_count() - 1
    monkeypatch.setattr(threading, "active_count", lambda: count() - of_the_runner)
    if why != "torch is there":
        monkeypatch.delitem(sys.modules, "torch")
    config = Config(
        crop="auto" if why == "unknown size" else 16,
        backbone="vit_small_patch14_dinov2",
        pixels="stream" if why == "streamed" else "auto",
    )
    target = scan_unlabelled(make_target(tmp_path / "images", each=1))
    enough = threading.Event()
    thread = threading.Thread(target=enough.wait)
    if why == "another thread":
        thread.start()
    with decoding_ahead(config, *([] if why == "nothing to decode" else [target])):
        enough.set()
    assert not forked
    if why == "another thread":
        thread.join()
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with pytest.raises(InterruptedError), decoding_ahead(Config(crop=16), target):
        pass


class TestSize:
    def test_it_is_what_the_settings_come_to(self) -> None:
        for settings in (read_recipe("digits"), read_recipe("office31-deit-base"), {"crop": 64}, {"resize": 300}, {}):
            config = Config(**settings, device="cpu")
            assert size_ahead(config) == resolve(config).resize

    def test_a_name_that_ends_in_224_is_the_crop_of_every_vision_transformer(self) -> None:
        names = [name for module in ("vision_transformer", "deit") for name in timm.list_models(module=module)]
        names += timm.list_pretrained("vit_*") + timm.list_pretrained("deit*")
        known = {name: size_ahead(Config(backbone=name)) for name in names}
        assert sum(size is not None for size in known.values()) > 100
        assert {native_crop(name) for name, size in known.items() if size is not None} == {224}
