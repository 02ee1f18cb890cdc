"""Fixtures that the tests of this folder share."""

from pathlib import Path

import pytest
from PIL import Image

from cdtrans.inputs import stream
from stores import make_images


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    return make_images(tmp_path / "images", 10)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files decoded so far, in the order in which they were begun."""
    names: list[str] = []
    real = stream.decode

    def decode(path: Path) -> Image.Image:
        names.append(path.name)
        return real(path)

    monkeypatch.setattr(stream, "decode", decode)
    return names
