"""A run that is killed, stopped or starved of disk goes on with the same command to the same bytes."""

import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import cdtrans
from cdtrans.errors import Interrupted
from cdtrans.inputs import stream
from cdtrans.inputs.pixels import store_folder
from cdtrans.network.backbone import create_backbone
from cdtrans.run import inputs, pipeline
from cdtrans.training import adaptation
from cdtrans.training.loop import Loop
from commands import Process, warm
from support import error_says, says
from tiny_task import TINY, Task, computed, draw, log_lines, make_task, tree

pytestmark = pytest.mark.slow

KILLS = 14
WRITES = (
    "config.yaml",
    "data.json",
    "environment.json",
    "images.csv",
    "state.pt",
    "source",
    "round-02.npz",
    "epoch-003.npz",
)
LAST_WRITES = ("adapted", "predictions.csv", "result.json")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    return make_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def whole(task: Task) -> Path:
    """The run that nothing happened to."""
    out = task.folder / "whole"
    assert warm().run(task.adapt(out), task.folder / "logs").code == 0
    return out


def start(task: Task, out: Path, *flags: str, crash: dict | None = None) -> Process:
    return warm().start(task.adapt(out, *flags), task.folder / "logs", crash=crash)


def finish(task: Task, out: Path, whole: Path) -> None:
    ended = start(task, out).wait()
    assert ended.code == 0, ended.err
    assert tree(out) == tree(whole)


class Watched:
    """The saved state of a run that is under way: how often it has been replaced so far, and where it stands."""

    def __init__(self, run: Path) -> None:
        self.file = run / "state" / "state.pt"
        self.seen, self.moves = self._identity(), 0

    def _identity(self) -> tuple[int, int] | None:
        try:
            stat = self.file.stat()
            return stat.st_ino, stat.st_mtime_ns
        except FileNotFoundError:
            return None

    def moved(self, times: int) -> bool:
        now = self._identity()
        if now is not None and now != self.seen:
            self.seen, self.moves = now, self.moves + 1
        return self.moves >= times

    def where(self) -> tuple[str, int, int]:
        state = torch.load(self.file, weights_only=True)
        return state["stage"], state["epoch"], state["step"]


def test_a_whole_run_leaves_what_the_design_promises(whole: Path) -> None:
    names = set(tree(whole))
    assert {
        "config.yaml",
        "environment.json",
        "log.jsonl",
        "predictions.csv",
        "result.json",
        "data.json",
        "views.npz",
        "logits.npz",
    } <= names
    assert {f"{m}/{f}" for m in ("source", "adapted", "last") for f in ("model.safetensors", "model.json")} <= names
    assert {"pairs/round-01.npz", "pairs/round-02.npz"} <= names
    assert {f"predictions/epoch-{e:03}.npz" for e in range(5)} <= names
    assert not [name for name in names if "state" in name or "draft" in name]
    events = [(line["event"], line.get("stage"), line["epoch"]) for line in log_lines(whole)]
    source = [("epoch", "source", e) for e in (1, 2, 3)]
    scores = [("scores", None, e) for e in range(5)]
    epochs = [[("epoch", "adaptation", e), scores[e]] for e in range(5)]
    pairs = [("pairs", None, e) for e in (1, 3)]
    assert events == [*source, scores[0], pairs[0], *epochs[1], *epochs[2], pairs[1], *epochs[3], *epochs[4]]


def test_the_same_command_gives_the_same_bytes(task: Task, whole: Path) -> None:
    finish(task, task.folder / "again", whole)


def test_another_seed_gives_other_weights(task: Task, whole: Path) -> None:
    out = task.folder / "seed"
    assert start(task, out, "--seed", "7").wait().code == 0
    changed = {name for name in tree(whole) if tree(whole)[name] != tree(out)[name]}
    assert {"source/model.safetensors", "adapted/model.safetensors", "log.jsonl"} <= changed


def test_killed_at_random_points_it_goes_on_to_the_same_bytes(task: Task, whole: Path) -> None:
    """On a slow machine a run may be done before it has been killed often enough; then the next one is."""
    dice, places, folders = random.Random(20), [], 0
    while len(places) < KILLS:
        folders += 1
        places += kill_again_and_again(task, task.folder / f"killed-{folders}", whole, dice, KILLS - len(places))
    assert {stage for stage, _, _ in places} == {"source", "adaptation"}, places


def kill_again_and_again(task: Task, out: Path, whole: Path, dice: random.Random, most: int) -> list[tuple]:
    """Kill one run until it has been killed often enough or is done, and finish it; gives where the kills hit it."""
    places = [("source", 0, 0)]
    while len(places) <= most:
        watched, process = Watched(out), start(task, out)
        process.wait_until(lambda watched=watched, moves=dice.choice((1, 2, 3)): watched.moved(moves))
        time.sleep(dice.random() * 0.01)
        process.send(signal.SIGKILL)
        ended = process.wait()
        if (out / "result.json").exists():  # too late
            break
        assert ended.code == -signal.SIGKILL, ended.err
        places.append(watched.where())
        assert _after(places[-1], places[-2]), f"no progress: {places}"
    finish(task, out, whole)
    return places[1:]


def _after(place: tuple[str, int, int], other: tuple[str, int, int]) -> bool:
    stages = ("source", "adaptation")
    return (stages.index(place[0]), *place[1:]) > (stages.index(other[0]), *other[1:])


@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_around_every_kind_of_write_it_goes_on_to_the_same_bytes(task: Task, whole: Path, when: str) -> None:
    """One run folder, killed at each write in turn; a kill before a write leaves a torn draft behind."""
    out = task.folder / f"killed-{when}"
    for name in WRITES + LAST_WRITES:
        ended = start(task, out, crash={"name": name, "when": when}).wait()
        assert ended.code == -signal.SIGKILL, f"{name}: {ended}"
    finish(task, out, whole)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_asked_to_stop_it_saves_and_goes_on_to_the_same_bytes(
    task: Task, whole: Path, number: signal.Signals, code: int
) -> None:
    out = task.folder / number.name
    for stage in ("source", "adaptation"):
        process, watched = start(task, out, "--save-every", "1000"), Watched(out)
        line = f'"stage": "{stage}"'
        assert process.wait_until(
            lambda line=line: (out / "log.jsonl").exists() and line in (out / "log.jsonl").read_text()
        )
        process.send(number)
        ended = process.wait()
        assert ended.code == code
        *at_once, in_the_end = ended.err.splitlines()
        assert all(line.startswith("Stopping after the current step") for line in at_once), "not between steps"
        assert says(in_the_end, "error: interrupted", "saved", "same command again")
        assert ("all settings: " in ended.out, "unfinished run" in ended.out) == (stage == "source", stage != "source")
        # without the save on the signal the state would be that of the stage's beginning
        assert watched.where()[0] == stage
        assert watched.where()[1:] > (1, 0)
        timings = [json.loads(line) for line in (out / "timings.jsonl").read_text().splitlines()]
        assert timings[-1]["stage"] == "session", "the cost of an interrupted session is known"
    finish(task, out, whole)


def test_ctrl_c_as_a_person_would_do_it(task: Task, whole: Path) -> None:
    """No warm process: `python -m cdtrans`. Then the same command again."""
    out = task.folder / "person"
    command = [sys.executable, "-m", "cdtrans", *task.adapt(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    watched, end = Watched(out), time.monotonic() + 120
    while not watched.moved(3) and process.poll() is None and time.monotonic() < end:
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    printed, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert says(error, "interrupted", "same command again")
    assert "Traceback" not in printed + error
    finish(task, out, whole)


SLOW: dict[str, Any] = {"backbone_args": {"patch_size": 16, "depth": 12}, "crop": 224, "resize": 256, "encode_batch": 8}


def test_ctrl_c_while_it_encodes_ends_it_at_once_and_costs_no_domain(tmp_path: Path) -> None:
    task = make_task(tmp_path / "task", **SLOW, recipe="best", effort="instant", epochs=1, pretrained=True)
    weights = tmp_path / "weights.safetensors"
    made = create_backbone(TINY["backbone"], crop=224, drop_path=0.0, args=SLOW["backbone_args"])
    save_file(made.state_dict(), weights)
    flags = ("--weights", str(weights), "--source-fit", "probe")
    talkative = {"cdtrans.runtime.screen.SILENCE_SECONDS": 0.0}

    def begin(out: Path) -> Process:
        return warm().start(task.adapt(out, *flags), tmp_path / "logs", constants=talkative)

    whole, out = tmp_path / "whole", tmp_path / "run"
    assert begin(whole).wait().code == 0
    process = begin(out)
    assert process.wait_until(lambda: "encoding target: 8/21" in process.files[0].read_text())
    pressed = time.monotonic()
    process.send(signal.SIGINT)
    ended = process.wait()
    assert time.monotonic() - pressed < 2
    assert ended.code == 130
    assert says(ended.err, "error: interrupted", "saved", "same command again")
    ended = begin(out).wait()
    assert ended.code == 0
    assert "encoding target: 8/21" in ended.out
    assert "encoding source" not in ended.out
    assert tree(out) == tree(whole)


@pytest.mark.parametrize("at", ["encoding", "planning"])
def test_ctrl_c_between_steps_loses_no_step(
    task: Task, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    out = tmp_path / "run"
    module, name = (adaptation.Encoder, "__call__") if at == "encoding" else (adaptation.Planner, "plan")
    real = getattr(module, name)

    def pressed(self: Any, *given: Any) -> Any:
        if (out / "state").exists() and '"stage": "adaptation", "epoch": 2' in (out / "log.jsonl").read_text():
            os.kill(os.getpid(), signal.SIGINT)
        return real(self, *given)

    monkeypatch.setattr(module, name, pressed)
    places = {"source": task.source, "target": task.target, "config": task.config, "out": out, "quiet": True}
    with pytest.raises(Interrupted):
        cdtrans.adapt(**places, save_every=1000)
    monkeypatch.undo()
    where = torch.load(out / "state/state.pt", weights_only=True)
    assert (where["stage"], where["epoch"], where["step"] > 0) == (
        "adaptation",
        *((2, True) if at == "encoding" else (3, False)),
    )
    cdtrans.adapt(**places)
    assert computed(out) == computed(whole)


def test_ctrl_c_while_it_waits_for_the_images_ends_it_at_once(tmp_path: Path) -> None:
    """Nothing is there to be saved yet."""
    task, out = make_task(tmp_path / "task"), tmp_path / "run"
    lock = store_folder(task.folder / "cache", task.source, TINY["resize"]) / "lock"
    lock.parent.mkdir(parents=True)
    with open(lock, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # as another run that decodes would
        process = start(task, out)
        said = process.files[0]
        assert process.wait_until(lambda: said.exists() and "another run" in said.read_text())
        process.send(signal.SIGINT)
        ended = process.wait(10)
    assert ended.code == 130
    assert says(ended.err, "error: interrupted")
    assert "saved" not in ended.err
    assert not out.exists()
    assert start(task, out).wait().code == 0


@pytest.mark.parametrize("where", ["scanning", "decoding", "decoding every time"])
def test_ctrl_c_before_training_interrupts_at_once(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    module, name = (inputs, "scan_unlabelled") if where == "scanning" else (stream, "decode")
    real = getattr(module, name)

    def pressed(path: Path, *others: object) -> object:
        os.kill(os.getpid(), signal.SIGINT)
        return real(path, *others)

    monkeypatch.setattr(module, name, pressed)
    pixels = "stream" if where == "decoding every time" else "store"
    places = {"source": task.source, "target": task.target, "config": task.config, "pixels": pixels}
    with pytest.raises(KeyboardInterrupt):
        cdtrans.adapt(**places, out=tmp_path / "run", cache=tmp_path / "c", quiet=True)
    assert not (tmp_path / "run").exists()
    monkeypatch.undo()
    cdtrans.adapt(**places, out=tmp_path / "run", cache=tmp_path / "c", quiet=True)


def test_a_finished_run_given_again_says_so_and_does_nothing(task: Task, whole: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in whole.rglob("*")}
    ended = start(task, whole).wait()
    assert ended.code == 0
    assert "already finished" in ended.out
    assert {p: p.stat().st_mtime_ns for p in whole.rglob("*")} == before


def test_a_second_process_refuses_and_the_first_is_not_disturbed(task: Task, whole: Path) -> None:
    out = task.folder / "two"
    first, watched = start(task, out), Watched(out)
    assert first.wait_until(lambda: watched.moved(3))
    os.kill(first.pid, signal.SIGSTOP)  # it holds the folder for as long as the second one needs
    try:
        second = start(task, out).wait()
    finally:
        os.kill(first.pid, signal.SIGCONT)
    assert second.code == 2
    assert says(second.err, "error: another process", str(out))
    assert second.err.count("\n") == 1
    assert first.wait().code == 0
    assert tree(out) == tree(whole)


def test_what_another_process_has_finished_meanwhile_is_not_trained_again(
    task: Task, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, decode_inputs = tmp_path / "run", pipeline.decode_inputs

    def late(*arguments: Any, **options: Any) -> Any:  # after the look at the folder, before its lock
        shutil.copytree(whole, out)
        return decode_inputs(*arguments, **options)

    monkeypatch.setattr(pipeline, "decode_inputs", late)
    cdtrans.adapt(source=task.source, target=task.target, out=out, config=task.config)
    assert "already finished" in capsys.readouterr().out
    assert tree(out) == tree(whole)


def test_images_that_have_changed_since_a_run_finished_are_told(task: Task, whole: Path) -> None:
    new = draw(task.target / "new.png", 0, seed=77)
    try:
        ended = start(task, whole).wait()
    finally:
        new.unlink()
    assert ended.code == 0
    assert says(ended.err, "warning: the target images have changed", "--out", "predict")


def test_other_pixels_in_files_of_the_same_size_are_refused_and_another_number_of_threads_is_told(
    tmp_path: Path,
) -> None:
    task, out = make_task(tmp_path), tmp_path / "run"
    files = [file.with_suffix(".bmp") for file in sorted(task.source.rglob("*.png"))]
    for file in files:
        with Image.open(file.with_suffix(".png")) as image:
            image.save(file)
        file.with_suffix(".png").unlink()
    start(task, out, crash={"name": "state.pt", "when": "after", "nth": 2}).wait()
    red, blue = task.source / "red" / "00.bmp", task.source / "blue" / "00.bmp"
    contents = red.read_bytes(), blue.read_bytes()
    assert len(contents[0]) == len(contents[1])
    blue.write_bytes(contents[0])
    red.write_bytes(contents[1])
    environment = out / "environment.json"
    environment.write_text(environment.read_text().replace('"threads": 1', '"threads": 7'))
    ended = start(task, out).wait()
    assert ended.code == 2
    told, error = ended.err.splitlines()
    assert says(error, "images", "have changed")
    assert says(told, "warning:", "7 CPU threads", "with 1", "OMP_NUM_THREADS=7")


def test_a_new_class_after_stage_1_is_a_change_of_the_images(tmp_path: Path) -> None:
    """And no matter of --source-model, which nobody has given."""
    task, out = make_task(tmp_path), tmp_path / "run"
    start(task, out, crash={"name": "round-02.npz", "when": "after"}).wait()
    assert (out / "source").exists()
    for n in range(4):
        draw(task.source / "new" / f"{n}.png", 0, seed=900 + n)
    ended = start(task, out).wait()
    assert ended.code == 2
    assert says(ended.err, "images", "have changed")
    assert "--source-model" not in ended.err


def test_after_stage_1_the_weights_it_began_with_are_not_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, weights = make_task(tmp_path / "task"), tmp_path / "weights.safetensors"
    vit = create_backbone(TINY["backbone"], crop=TINY["crop"], drop_path=0.0, args=TINY["backbone_args"])
    save_file(vit.state_dict(), weights)
    places = {"source": task.source, "target": task.target, "config": task.config, "weights": weights, "quiet": True}
    cdtrans.adapt(**places, out=tmp_path / "whole")

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(adaptation, "adapt_to_target", stopped)
        with pytest.raises(KeyboardInterrupt):
            cdtrans.adapt(**places, out=tmp_path / "run")
    weights.unlink()
    cdtrans.adapt(**places, out=tmp_path / "run")
    assert tree(tmp_path / "run") == tree(tmp_path / "whole")
    with error_says("no weights file", weights.name):
        cdtrans.adapt(**places, out=tmp_path / "new")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
@pytest.mark.parametrize("after", [4, 13])
def test_on_a_gpu_it_goes_on_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """In either stage; what was on the GPU, such as the pairs, comes back to it."""
    task, out, update, updates = make_task(tmp_path, device="cuda"), tmp_path / "run", Loop.update, 0

    def update_or_stop(loop: Loop, names: tuple[str, ...], losses: torch.Tensor) -> None:
        nonlocal updates
        update(loop, names, losses)
        updates += 1
        if updates == after:
            raise KeyboardInterrupt

    monkeypatch.setattr(Loop, "update", update_or_stop)
    places = {"source": task.source, "target": task.target, "config": task.config}
    with pytest.raises(KeyboardInterrupt):
        cdtrans.adapt(**places, out=out, quiet=True)
    cdtrans.adapt(**places, out=out, quiet=True)
    assert [line["epoch"] for line in log_lines(out) if line["event"] == "epoch"] == [1, 2, 3, 1, 2, 3, 4]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 2 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = os.geteuid() == 0 and shutil.which("mount") is not None
    command = ["mount", "-t", "tmpfs", "-o", "size=2m,nr_inodes=200", "none", str(place)]
    if not mounted or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a small tmpfs can only be mounted by root")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


# The bytes left on the disk, the time between states, and what then no longer fits.
FULL = [(0, 0, "config.yaml"), (500_000, 0, "state/state.pt"), (230_000, 1000, ".source.draft/model.safetensors")]


@pytest.mark.parametrize(("left", "save_every", "named"), FULL)
def test_a_full_disk_is_one_sentence_and_the_run_goes_on_afterwards(
    task: Task, whole: Path, small_disk: Path, left: int, save_every: int, named: str
) -> None:
    out, ballast = small_disk / "run", small_disk / "ballast"
    ballast.write_bytes(bytes(shutil.disk_usage(small_disk).free - left))
    ended = start(task, out, "--save-every", str(save_every)).wait()
    assert ended.code == 2, ended.err
    assert says(ended.err, "error: ", "disk is full", f"'{out / named}'")
    assert ended.err.count("\n") == 1
    assert not [p for p in out.rglob(".*.draft") if p.is_file()]
    if left > 200_000:
        assert torch.load(out / "state" / "state.pt", weights_only=True)["stage"] == "source"
    ballast.unlink()
    finish(task, out, whole)
