"""The methods by name. To add one, write its file and add its line to methods.csv, with the measured time of a step,
relative to CDTrans (docs/results/methods.md); nothing else knows about it.

Needs no torch, so that a wrong name is reported at once. A class is imported when it is used."""

import csv
import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdtrans.config import is_method_file
from cdtrans.errors import CdtransError, MethodError, MissingFileError, SettingsError, nearest

if TYPE_CHECKING:
    from cdtrans.methods.base import Method

_TABLE = Path(__file__).with_name("methods.csv").read_text(encoding="utf-8")
METHODS = {row["name"]: row for row in csv.DictReader(_TABLE.splitlines())}  # in the order of `cdtrans methods`
WITH_TARGET_LABELS = ("ground_truth",)  # only `cdtrans ablate` has these: cdtrans.paper.known_pairs


def require_method(name: str) -> None:
    """Refuse a method that does not exist. A class in a user's file is looked up when it is loaded."""
    if name in WITH_TARGET_LABELS:
        raise _with_labels(name)
    if is_method_file(name):
        file = name.rpartition(":")[0]
        if not Path(file).is_file():
            raise MissingFileError("no-method-file", f"There is no file '{file}' with the method; check its path.")
    elif name.endswith(".py"):
        raise SettingsError("method-unknown", f"'{name}' names no class: give a method of your own as FILE.py:CLASS.")
    elif name not in METHODS:
        raise SettingsError("method-unknown", f"Unknown method '{name}': {nearest(name, list(METHODS))}")


def method_class(name: str) -> "type[Method]":
    """The class of a method, by its name or as FILE.py:CLASS."""
    require_method(name)
    if is_method_file(name):
        return _checked(class_in_file(*name.rsplit(":", 1)), name)
    module, _, attribute = METHODS[name]["class"].partition(":")
    loaded: type[Method] = getattr(import_module(f"cdtrans.methods.{module}"), attribute)
    return loaded


def _with_labels(name: str) -> MethodError:
    return MethodError(
        "method-needs-labels",
        f"The method '{name}' trains on target labels, which 'adapt' does not read; see 'cdtrans ablate --help'.",
    )


def _checked(method: "type[Method]", name: str) -> "type[Method]":
    """Refuse a class that cannot work before anything is trained."""
    from cdtrans.methods.base import Method

    if method.uses_target_labels:
        raise _with_labels(name)
    if method.trains and method.losses is Method.losses and method.train_step is Method.train_step:
        raise MethodError(
            "method-no-step", f"The method '{name}' has neither 'losses' nor 'train_step'; see docs/methods.md."
        )
    if not is_dataclass(method.Options) or any(
        f.default is MISSING and f.default_factory is MISSING for f in fields(method.Options)
    ):
        raise MethodError(
            "method-options", f"The Options of '{name}' must be a dataclass whose fields all have defaults."
        )
    return method


def class_in_file(file: str, attribute: str) -> "type[Method]":
    """The class of a method in a user's file."""
    from cdtrans.methods.base import Method

    unique = hashlib.sha256(str(Path(file).resolve()).encode()).hexdigest()[:12]
    spec = importlib.util.spec_from_file_location(f"cdtrans_method_{unique}", file)
    assert spec is not None, "the name ends in .py"
    assert spec.loader is not None, "the name ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    with faults_named(f"{file}:{attribute}"):
        spec.loader.exec_module(module)

    def is_method(value: Any) -> bool:
        return isinstance(value, type) and issubclass(value, Method) and value is not Method

    candidate = getattr(module, attribute, None)
    if not is_method(candidate):
        methods = [name for name, value in vars(module).items() if is_method(value)]
        hint = nearest(attribute, methods) if methods else "a method is a subclass of cdtrans.methods.base.Method."
        raise MethodError("method-not-in-file", f"'{file}' has no method '{attribute}': {hint}")
    return candidate  # type: ignore[return-value]


@contextmanager
def faults_named(method: str) -> Iterator[None]:
    """Report whatever the code in a user's method file raises, SystemExit too, as a fault of that file."""
    try:
        yield
    except (CdtransError, KeyboardInterrupt, MemoryError):
        raise
    except BaseException as error:
        frames, file = traceback.extract_tb(error.__traceback__), method.rpartition(":")[0]
        lines = [frame.lineno for frame in frames if frame.filename == file]
        if isinstance(error, SyntaxError):
            lines = [error.lineno or 1]
        # A backward pass fails outside of the file.
        theirs = lines or any(frame.name in ("train_step", "exec_module") for frame in frames)
        if not is_method_file(method) or not theirs or "DefaultCPUAllocator" in str(error):
            raise
        place = f", line {lines[-1]}" if lines else ""
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        raise MethodError("method-file-fails", f"The method in '{file}'{place} fails: {cause}. Correct it.") from error
