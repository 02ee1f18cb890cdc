"""cdtrans: labelled source images and unlabelled target images in, a target classifier out."""

from importlib import import_module

TYPE_CHECKING = False  # not typing's: its import takes longer than all the rest before Ctrl-C is answered
if TYPE_CHECKING:
    from typing import Any

    from cdtrans.errors import (
        CdtransError as CdtransError,
        DataError as DataError,
        DeviceError as DeviceError,
        MethodError as MethodError,
        RunError as RunError,
        SettingsError as SettingsError,
    )
    from cdtrans.measure.ask import Asked as Asked
    from cdtrans.measure.measured import Answered as Answered, answer as answer, evaluate as evaluate
    from cdtrans.record.outcome import Measured as Measured
    from cdtrans.reporting.page import report as report
    from cdtrans.run.ask import ask as ask
    from cdtrans.run.check import Check as Check, check as check
    from cdtrans.run.pipeline import Result as Result, adapt as adapt
    from cdtrans.serving.classifier import (
        Classifier as Classifier,
        Prediction as Prediction,
        Predictions as Predictions,
        load as load,
    )
    from cdtrans.serving.export import Exported as Exported, Pushed as Pushed, export as export, push as push
    from cdtrans.serving.predict import Predicted as Predicted, predict as predict
    from cdtrans.studies.benchmark import bench as bench
    from cdtrans.studies.study import BenchResult as BenchResult

    __version__: str

PUBLIC = {  # module -> its public names
    "errors": "CdtransError DataError DeviceError MethodError RunError SettingsError",
    "measure.ask": "Asked",
    "measure.measured": "Answered answer evaluate",
    "record.outcome": "Measured",
    "reporting.page": "report",
    "run.ask": "ask",
    "run.check": "Check check",
    "run.pipeline": "Result adapt",
    "serving.classifier": "Classifier Prediction Predictions load",
    "serving.export": "Exported Pushed export push",
    "serving.predict": "Predicted predict",
    "studies.benchmark": "bench",
    "studies.study": "BenchResult",
}
_HOMES = {name: f"cdtrans.{module}" for module, names in PUBLIC.items() for name in names.split()}

__all__ = sorted(_HOMES)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> "Any":
    """Public names are imported when they are first used, so that `cdtrans --help` does not wait for torch."""
    if name == "__version__":
        return import_module("importlib.metadata").version("cdtrans")
    if name not in _HOMES:
        raise AttributeError(f"module 'cdtrans' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
