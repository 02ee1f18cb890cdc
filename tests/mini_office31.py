"""Office-31 with three of its classes and a few images of each."""

from pathlib import Path

from tiny_task import draw

CLASSES = ("mug", "pen", "ruler")
EACH = {"amazon": 8, "dslr": 5, "webcam": 6}


def make_mini(data: Path) -> Path:
    for n, (domain, each) in enumerate(EACH.items()):
        for kind, name in enumerate(CLASSES):
            for i in range(each):
                draw(data / domain / "images" / name / f"frame_{i:04}.png", kind, seed=1000 * n + i, shift=0.5 * n)
    return data
