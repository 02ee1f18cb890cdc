"""What `export` wrote as something to load again: a file, a hub folder, or a repository on the Hugging Face hub. Needs
no torch."""

import re
from importlib.util import find_spec
from pathlib import Path

from cdtrans.errors import CdtransError
from cdtrans.record.run_folder import CARD, CONFIG
from cdtrans.serving.hub import download

SUFFIXES = (".onnx", ".safetensors")
FILES = ("model.safetensors", "model.onnx")  # of a hub folder; the first that it has is loaded
CODE = ("modeling_cdtrans.py", "tapped_vit.py")  # of a hub folder that timm cannot read; transformers runs them
ON_HUB = re.compile(r"hf:/*(.*)")  # as a path, 'hf://' has lost a slash


def is_exported(place: str | Path) -> bool:
    """Whether this is no run folder but something that `export` wrote, existing or not."""
    path = Path(place)
    if path.is_dir():
        return not any((path / name).exists() for name in (CONFIG, CARD)) and any((path / f).exists() for f in FILES)
    return path.suffix.lower() in SUFFIXES or ON_HUB.fullmatch(path.as_posix()) is not None


def require_run(place: str | Path, given: dict[str, bool]) -> None:
    """Refuse options that need what only a run folder has."""
    if flag := next((name for name, is_given in given.items() if is_given), None):
        raise CdtransError(f"--{flag} needs a run folder, and '{place}' is an exported model; leave it out.")


def exported_file(place: str | Path) -> Path:
    """The file to load; one on the hub is downloaded."""
    file = Path(place)
    if on_hub := ON_HUB.fullmatch(file.as_posix()):
        file = download(on_hub[1], FILES)
    if file.is_dir():
        found = [file / name for name in FILES if (file / name).exists()]
        if not found:
            raise CdtransError(f"'{place}' holds neither {' nor '.join(FILES)}; 'cdtrans push' uploads them.")
        file = found[0]
    if not file.is_file():
        raise CdtransError(f"'{file}' does not exist; 'cdtrans export RUN --out {file.name}' writes such a file.")
    if file.suffix.lower() == ".onnx" and find_spec("onnxruntime") is None:
        raise CdtransError(f"'{file}' needs onnxruntime: 'pip install cdtrans[onnx]'.")
    return file
