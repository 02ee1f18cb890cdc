"""A task that a run finishes in a second."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    "seed": 2,  # its last epoch is chosen, with nothing against it, as tests of evaluation and report expect
}
QUICK = TINY | {"source_epochs": 1, "epochs": 1, "source_lr": 0.05, "lr": 0.025, "save_every": 30}
CLASSES = ("blue", "green", "red")
UNTIMED = "timings.jsonl"  # the one file of a run that may differ between equal runs


def draw(file: Path, kind: int, seed: int, *, shift: float = 0.0) -> Path:
    """A noisy image whose colour hints at its class; `shift` moves it into another domain."""
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
    """folder/NUMBER.png: no class in a name; it is NUMBER modulo 3."""
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
    """Every file and folder of a run with a digest of its bytes, except for the file of times."""
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() if p.is_file() else "folder"
        for p in sorted(folder.rglob("*"))
        if p.name != UNTIMED
    }


def computed(folder: Path) -> dict[str, str]:
    """The digests of a run's results alone, without its settings and the origin of its stage 1."""
    return {name: digest for name, digest in tree(folder).items() if name not in ("config.yaml", "log.jsonl")}


def after_stage_1(run: Path) -> list[dict[str, Any]]:
    """The log of a run from the end of stage 1 on."""
    return [line for line in log_lines(run) if line.get("stage") != "source" and line["event"] != "source_model"]


def log_lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines()]
