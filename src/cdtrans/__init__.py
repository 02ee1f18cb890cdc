"""cdtrans: labelled source images and unlabelled target images in, a target classifier out."""

from importlib import import_module

TYPE_CHECKING = False  # not typing's: its import takes longer than all the rest before Ctrl-C is answered
if TYPE_CHECKING:
    from typing import Any

    from cdtrans.errors import CdtransError
    from cdtrans.labelling.answer import Answered, answer
    from cdtrans.labelling.ask import Asked, ask
    from cdtrans.run.pipeline import Result, adapt
    from cdtrans.serving.classifier import Classifier, Prediction, load
    from cdtrans.serving.export import Exported, export

__all__ = [
    "Answered",
    "Asked",
    "CdtransError",
    "Classifier",
    "Exported",
    "Prediction",
    "Result",
    "adapt",
    "answer",
    "ask",
    "export",
    "load",
]

_HOMES = {
    "Answered": "cdtrans.labelling.answer",
    "answer": "cdtrans.labelling.answer",
    "Asked": "cdtrans.labelling.ask",
    "ask": "cdtrans.labelling.ask",
    "CdtransError": "cdtrans.errors",
    "Classifier": "cdtrans.serving.classifier",
    "Exported": "cdtrans.serving.export",
    "export": "cdtrans.serving.export",
    "Prediction": "cdtrans.serving.classifier",
    "load": "cdtrans.serving.classifier",
    "Result": "cdtrans.run.pipeline",
    "adapt": "cdtrans.run.pipeline",
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> "Any":
    """Public names are imported when they are first used, so that `cdtrans --help` does not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'cdtrans' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
