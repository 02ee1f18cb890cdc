"""cdtrans: labelled source images and unlabelled target images in, a target classifier out."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cdtrans.classifier import Classifier, Prediction, load
    from cdtrans.errors import CdtransError
    from cdtrans.exports import Exported, export
    from cdtrans.pipeline import Result, adapt

__all__ = ["CdtransError", "Classifier", "Exported", "Prediction", "Result", "adapt", "export", "load"]

_HOMES = {
    "CdtransError": "cdtrans.errors",
    "Classifier": "cdtrans.classifier",
    "Exported": "cdtrans.exports",
    "export": "cdtrans.exports",
    "Prediction": "cdtrans.classifier",
    "load": "cdtrans.classifier",
    "Result": "cdtrans.pipeline",
    "adapt": "cdtrans.pipeline",
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used, so that `cdtrans --help` does not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'cdtrans' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
