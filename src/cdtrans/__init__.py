"""cdtrans: labelled source images and unlabelled target images in, a target classifier out."""

from importlib import import_module

TYPE_CHECKING = False  # not typing's: its import takes longer than all the rest before Ctrl-C is answered
if TYPE_CHECKING:
    from typing import Any

    from cdtrans.errors import CdtransError
    from cdtrans.measure.answer import Answered, answer
    from cdtrans.measure.ask import Asked, ask
    from cdtrans.measure.evaluate import Evaluation, evaluate
    from cdtrans.reporting.report import report
    from cdtrans.run.check import Check, check
    from cdtrans.run.pipeline import Result, adapt
    from cdtrans.serving.classifier import Classifier, Prediction, Predictions, load
    from cdtrans.serving.export import Exported, Pushed, export, push
    from cdtrans.serving.predict import Predicted, predict
    from cdtrans.studies.benchmark import BenchResult, bench

__all__ = [
    "Answered",
    "Asked",
    "BenchResult",
    "CdtransError",
    "Check",
    "Classifier",
    "Evaluation",
    "Exported",
    "Predicted",
    "Prediction",
    "Predictions",
    "Pushed",
    "Result",
    "adapt",
    "answer",
    "ask",
    "bench",
    "check",
    "evaluate",
    "export",
    "load",
    "predict",
    "push",
    "report",
]

_HOMES = {
    "bench": "cdtrans.studies.benchmark",
    "BenchResult": "cdtrans.studies.benchmark",
    "CdtransError": "cdtrans.errors",
    "evaluate": "cdtrans.measure.evaluate",
    "Evaluation": "cdtrans.measure.evaluate",
    "answer": "cdtrans.measure.answer",
    "Answered": "cdtrans.measure.answer",
    "ask": "cdtrans.measure.ask",
    "Asked": "cdtrans.measure.ask",
    "report": "cdtrans.reporting.report",
    "check": "cdtrans.run.check",
    "Check": "cdtrans.run.check",
    "adapt": "cdtrans.run.pipeline",
    "Result": "cdtrans.run.pipeline",
    "Classifier": "cdtrans.serving.classifier",
    "load": "cdtrans.serving.classifier",
    "Prediction": "cdtrans.serving.classifier",
    "Predictions": "cdtrans.serving.classifier",
    "export": "cdtrans.serving.export",
    "Exported": "cdtrans.serving.export",
    "predict": "cdtrans.serving.predict",
    "Predicted": "cdtrans.serving.predict",
    "push": "cdtrans.serving.export",
    "Pushed": "cdtrans.serving.export",
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> "Any":
    """Public names are imported when they are first used, so that `cdtrans --help` does not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'cdtrans' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
