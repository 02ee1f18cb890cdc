"""Images decoded by another process while torch is imported."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cdtrans.config import Config
from cdtrans.inputs.decode import decoding_ahead, size_ahead
from cdtrans.inputs.pixels import list_stores
from cdtrans.inputs.scan import scan_unlabelled
from cdtrans.network.backbone import native_crop, resolve_name
from tiny_task import make_target

# A process without torch, which waits until so many images are in the store, and then looks whether a child is left.
SCRIPT = """
import os, sys, time
from pathlib import Path
from cdtrans.config import Config
from cdtrans.inputs.decode import decoding_ahead
from cdtrans.inputs.pixels import list_stores
from cdtrans.inputs.scan import scan_unlabelled
cache, images, wanted = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
print("printed once", end="")  # still buffered when the child is forked
with decoding_ahead(Config(crop=16, cache=str(cache)), scan_unlabelled(images)):
    end = time.monotonic() + 30
    while sum(s.images for s in list_stores(cache)) < wanted and time.monotonic() < end:
        time.sleep(0.01)
try:
    os.waitpid(-1, 0)
except ChildProcessError:
    print(", no child left", "torch" in sys.modules)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("each", "wanted"), [(3, 9), (400, 1)])
def test_the_store_is_filled_meanwhile_and_no_longer(each: int, wanted: int, tmp_path: Path) -> None:
    images, cache = make_target(tmp_path / "images", each=each), tmp_path / "cache"
    (images / "bad.png").write_bytes(b"no image")
    command = [sys.executable, "-c", SCRIPT, str(cache), str(images), str(wanted)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert ended.stdout == "printed once, no child left False\n"
    (store,) = list_stores(cache)
    assert (store.root, store.size) == (images, 18)
    assert wanted <= store.images <= 9 if each == 3 else 0 < store.images < 1200


@pytest.mark.parametrize("why", ["torch is there", "another thread", "streamed", "unknown size", "nothing to decode"])
def test_no_process_is_forked_where_that_is_useless_or_unsafe(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fork() -> int:
        raise AssertionError("a process was forked")

    monkeypatch.setattr("os.fork", fork)
    monkeypatch.setattr(threading, "active_count", lambda: 2 if why == "another thread" else 1)
    if why != "torch is there":
        monkeypatch.delitem(sys.modules, "torch")
    crop, pixels = "auto" if why == "unknown size" else 16, "stream" if why == "streamed" else "auto"
    config = Config(crop=crop, backbone="vit_small_patch14_dinov2", pixels=pixels)  # type: ignore[arg-type]
    target = scan_unlabelled(make_target(tmp_path / "images", each=1))
    with decoding_ahead(config, *([] if why == "nothing to decode" else [target])):
        pass


def test_the_size_is_that_of_the_run() -> None:
    for name in ("deit_small_patch16_224", "vit_base_patch16_224.augreg_in21k", Config().backbone):
        assert native_crop(resolve_name(name)) == 224
        assert size_ahead(Config(backbone=name)) == 256
    assert size_ahead(Config(backbone="vit_small_patch14_dinov2")) is None
    assert size_ahead(Config(crop=112)) == 128
    assert size_ahead(Config(crop=112, resize=120)) == 120
