"""A task that a run finishes in a second, and a way to run the command line in fresh processes without waiting for
torch to be imported each time: a warm process forks one child for each command. The children are real processes, and
what happens to them (SIGKILL, SIGINT, a full disk) is real. A cold process does the same without torch, for tests of
what is done before torch is imported."""

import atexit
import functools
import gc
import hashlib
import importlib
import json
import os
import pkgutil
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import yaml
from PIL import Image

# As small as a ViT can be; every step is saved (save_every: 0), both stages take epochs, pairs are searched twice.
TINY: dict[str, Any] = {
    "recipe": "authors",
    "backbone": "vit_tiny_patch16_224",
    "backbone_args": {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2},
    "pretrained": False,
    "crop": 16,
    "resize": 18,
    "source_epochs": 3,
    "epochs": 4,
    "rebuild_every": 2,
    "warmup_epochs": 2,
    "batch_size": 8,
    "source_lr": 0.1,
    "lr": 0.05,
    "save_every": 0,
    "device": "cpu",
    "report": False,
    "guard": False,  # such small models are rarely any good, and tests of other things must go on
    "seed": 2,  # whose last epoch is the chosen one, with nothing against it: tests of evaluation and report say so
}
QUICK = TINY | {"source_epochs": 1, "epochs": 1, "source_lr": 0.05, "lr": 0.025, "save_every": 30}
CLASSES = ("blue", "green", "red")
LOOKS = 10  # a process is asked whether it has ended only after so many milliseconds: that costs time too
UNTIMED = "timings.jsonl"  # the one file of a run that may differ between equal runs


def draw(file: Path, kind: int, seed: int, *, shift: float = 0.0) -> Path:
    """A noisy picture whose colour hints at its class; `shift` moves it into another domain."""
    rng = np.random.default_rng([seed, kind])
    pixels = rng.normal(110, 45, (20, 22, 3))
    pixels[..., 2 - kind] += 25 + 30 * rng.random()
    pixels[..., (3 - kind) % 3] += 70 * shift * rng.random()
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(file)
    return file


def make_source(folder: Path, each: int = 8) -> Path:
    """folder/CLASS/NUMBER.png"""
    for kind, name in enumerate(CLASSES):
        for n in range(each):
            draw(folder / name / f"{n:02}.png", kind, seed=n)
    return folder


def make_target(folder: Path, each: int = 7) -> Path:
    """folder/NUMBER.png: nothing in a name tells the class, which is NUMBER modulo 3."""
    for n in range(each * len(CLASSES)):
        draw(folder / f"{n:02}.png", n % len(CLASSES), seed=100 + n, shift=1.0)
    return folder


@dataclass(frozen=True)
class Task:
    folder: Path
    source: Path
    target: Path
    config: Path

    def adapt(self, out: Path, *flags: str) -> list[str]:
        """The arguments of the command that adapts this task into `out`."""
        places = [str(self.source), str(self.target)]
        return ["adapt", *places, "--out", str(out), "--config", str(self.config), *flags]


def make_task(folder: Path, **settings: Any) -> Task:
    config = folder / "tiny.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    config.write_text(yaml.safe_dump(TINY | {"cache": str(folder / "cache")} | settings, sort_keys=False))
    return Task(folder, make_source(folder / "source"), make_target(folder / "target"), config)


def tree(folder: Path) -> dict[str, str]:
    """Every file and folder of a run with a digest of its bytes, but for what holds a clock."""
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() if p.is_file() else "folder"
        for p in sorted(folder.rglob("*"))
        if p.name != UNTIMED
    }


def computed(folder: Path) -> dict[str, str]:
    """The same of all that a run came to, but not of where it says what it was told and where its stage 1 is from. The
    advice of `eval` names its folder."""
    found = {name: digest for name, digest in tree(folder).items() if name not in ("config.yaml", "log.jsonl")}
    if (folder / "eval.json").exists():
        found["eval.json"] = (folder / "eval.json").read_text(encoding="utf-8").replace(str(folder), "RUN")
    return found


def after_stage_1(run: Path) -> list[dict[str, Any]]:
    """The log from there on."""
    return [line for line in log_lines(run) if line.get("stage") != "source" and line["event"] != "source_model"]


def log_lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines()]


@dataclass(frozen=True)
class Ended:
    code: int  # negative: the signal that killed it
    out: str
    err: str


class Process:
    """A command under way in a child of the warm process."""

    def __init__(self, server: "Server", pid: int, files: tuple[Path, Path]) -> None:
        self.server, self.pid, self.files = server, pid, files
        self.code: int | None = None

    def poll(self) -> int | None:
        if self.code is None:
            self.code = self.server.ask({"poll": self.pid})
        return self.code

    def send(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait_until(self, happened: Callable[[], bool], seconds: float = 60) -> bool:
        """True once it has happened, False if the process ended before."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for _ in range(LOOKS):
                if happened():
                    return True
                time.sleep(0.001)
            if self.poll() is not None:
                return happened()
        raise AssertionError(f"waited {seconds} s in vain; the process printed {self.files[1].read_text()!r}")

    def wait(self, seconds: float = 120) -> Ended:
        end = time.monotonic() + seconds
        while self.poll() is None:
            assert time.monotonic() < end, f"waited {seconds} s in vain for {self.files[1].read_text()!r}"
            time.sleep(LOOKS * 0.001)
        assert self.code is not None
        out, err = (file.read_text(encoding="utf-8", errors="surrogateescape") for file in self.files)
        return Ended(self.code, out, err)


may_be_slow = True  # whether the test that runs now is marked `slow`; conftest.py sets it


class Server:
    def __init__(self, temperature: str) -> None:
        command = [sys.executable, __file__, temperature]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.count = 0

    def ask(self, order: dict[str, Any]) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(10)

    def start(
        self,
        arguments: list[str],
        logs: Path,
        *,
        crash: dict[str, Any] | None = None,
        fork_jobs: bool = False,
        folder: Path | None = None,
        without: Sequence[str] = (),
        look_for: Sequence[str] = (),
        env: dict[str, str] | None = None,
        constants: dict[str, Any] | None = None,
    ) -> Process:
        """`constants`: other values of some, by their full name.
        `fork_jobs`: the processes that `cdtrans bench` starts are forked too, so that each has torch already.
        `folder`: where it is started. `without`: modules that it cannot import. `look_for`: at the end, which of these
        modules it has imported is printed, as a list on a line of its own."""
        self.count += 1
        logs.mkdir(parents=True, exist_ok=True)
        files = logs / f"{self.count}.out", logs / f"{self.count}.err"
        order = {"start": arguments, "out": str(files[0]), "err": str(files[1]), "crash": crash, "fork_jobs": fork_jobs}
        order |= {"folder": str(folder or Path.cwd()), "without": list(without), "look_for": list(look_for)}
        order["constants"] = constants or {}
        order["env"] = {"CDTRANS_CACHE": os.environ.get("CDTRANS_CACHE", str(logs / "cache"))} | (env or {})
        return Process(self, self.ask(order), files)

    def run(self, arguments: list[str], logs: Path, **how: Any) -> Ended:
        return self.start(arguments, logs, **how).wait()


def warm() -> Server:
    """The warm process of this test session; started when it is first needed, ended with the session."""
    assert may_be_slow, "this test uses the warm process: mark it with pytest.mark.slow"
    return _started("warm")


def cold() -> Server:
    """The same with a process that has imported nothing slow."""
    return _started("cold")


@functools.cache
def _started(temperature: str) -> Server:
    server = Server(temperature)
    atexit.register(server.close)
    return server


def start_ranks(count: int, arguments: list[str], logs: Path, **how: Any) -> list[Process]:
    """The command in so many ranks, as torchrun starts them."""
    port = random.SystemRandom().randrange(20_000, 32_000)  # the system gives these to no other connection meanwhile
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    own = ({"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count))
    return [warm().start(arguments, logs, env=shared | rank, **how) for rank in own]


# What follows runs in the warm or cold process.


def _serve(temperature: str) -> None:
    if temperature == "warm":
        _import_all()
    else:
        import cdtrans.cli.app
        import cdtrans.run.pipeline  # noqa: F401 (so that the children need not)
    os.fsync = lambda file: None  # no test cuts the power, and a kill loses nothing that was written
    gc.freeze()  # what is there now is no garbage: the children need not look through it
    for line in sys.stdin:
        order = json.loads(line)
        answer = _start(order) if "start" in order else _poll(order["poll"])
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _import_all() -> None:
    """Every module that a command may need, also those that it imports late, so that no child need do it again."""
    import torch

    import cdtrans

    for module in pkgutil.walk_packages(cdtrans.__path__, "cdtrans."):
        if module.name not in (
            "cdtrans.__main__",
            "cdtrans.network.fast.kernels",
            "cdtrans.serving.modeling_cdtrans",  # needs transformers
        ):
            importlib.import_module(module.name)
    torch.set_num_threads(1)


def _poll(pid: int) -> int | None:
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def _start(order: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    out, err = (os.open(order[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for name in ("out", "err"))
    os.chdir(order["folder"])
    os.environ.update(order["env"])
    for name in order["without"]:
        sys.modules[name] = None  # type: ignore[assignment]
    for name, value in order["constants"].items():
        module, _, constant = name.rpartition(".")
        setattr(importlib.import_module(module), constant, value)
    if order["crash"]:
        _crash_at(**order["crash"])
    if order["fork_jobs"]:
        import cdtrans.studies.jobs

        cdtrans.studies.jobs.Children = _ForkedJobs  # type: ignore[assignment,misc]
    _run_and_exit(order["start"], out, err, order["look_for"])
    raise AssertionError("it has exited")


def _run_and_exit(arguments: Sequence[str], out: int, err: int, look_for: Sequence[str] = ()) -> None:
    """The command line, in a child that ends with it."""
    code = 70
    try:
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.argv = ["cdtrans", *arguments]
        from cdtrans.cli.entry import main

        main()
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    finally:
        if look_for:
            print([name for name in look_for if name in sys.modules])
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class _ForkedJobs:
    """In place of `cdtrans.runtime.children.Children`: this process has imported everything, so it forks by itself."""

    def __init__(self, side_by_side: int) -> None: ...

    def __enter__(self) -> "_ForkedJobs":
        return self

    def __exit__(self, *_: object) -> None: ...

    def start(self, *how: Any) -> "_ForkedJob":
        return _ForkedJob(*how)


class _ForkedJob:
    """What `Children.start` gives."""

    def __init__(self, arguments: Sequence[str], out: IO[bytes], err: IO[bytes]) -> None:
        from cdtrans.runtime.signals import die_with_parent

        self.code: int | None = None
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            die_with_parent()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            os.closerange(3, 256)  # the benchmark's lock among them
            _run_and_exit(arguments, 1, 2)

    def poll(self) -> int | None:
        if self.code is None:
            self.code = _poll(self.pid)
        return self.code

    def wait(self) -> None:
        while self.poll() is None:
            time.sleep(0.01)

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _crash_at(name: str, when: str, nth: int = 1) -> None:
    """SIGKILL this process just before or after the nth time that something takes the name `name`; before it, a file's
    draft is also cut in half, as if the kill had come while it was written."""
    replace, seen = os.replace, 0

    def replace_or_die(draft: Any, final: Any) -> None:
        nonlocal seen
        seen += Path(final).name == name
        due = seen == nth and Path(final).name == name
        if due and when == "before":
            if Path(draft).is_file():
                os.truncate(draft, Path(draft).stat().st_size // 2)
            os.kill(os.getpid(), 9)
        replace(draft, final)
        if due:
            os.kill(os.getpid(), 9)

    os.replace = replace_or_die


if __name__ == "__main__":
    _serve(sys.argv[1])
