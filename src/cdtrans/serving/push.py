"""Upload a run's classifier to the Hugging Face hub, as the hub folder of `export`."""

from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cdtrans.record.run_folder import find_model
from cdtrans.runtime.screen import Screen
from cdtrans.schema import checked
from cdtrans.serving.export import export_folder
from cdtrans.serving.hub import require_name, upload


@dataclass(frozen=True)
class Pushed:
    """What was uploaded. The keys are promised by `push --json`."""

    name: str  # USER/NAME
    address: str
    model: str  # a description of the model
    bytes: int

    def summary(self) -> dict[str, Any]:
        return asdict(self)


@checked()
def push(
    run: str | Path, name: str, *, private: bool = False, model: str = "chosen", screen: Screen | None = None
) -> Pushed:
    """Upload a finished run's classifier to USER/NAME: weights, ONNX and a model card; no image. With
    `private`, a new repository can be seen only by its owner. `cdtrans.load("hf://USER/NAME")` loads it."""
    screen = screen or Screen(quiet=True)
    require_name(name)
    find_model(Path(run), model)
    with TemporaryDirectory(prefix="cdtrans-") as place:
        exported = export_folder(Path(run), Path(place) / "hub", model=model, screen=screen, name=name)
        with screen.track(f"uploading to {name}", 1) as task:
            address = upload(exported.file, name, private=private)
            task.advance(1)
    return Pushed(name, address, exported.model, exported.bytes)
