"""The methods by name. To add one, write its file and add its line here; nothing else knows about it.

Needs no torch, so that a wrong name is reported at once. A class is imported when it is used."""

import importlib.util
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdtrans.errors import CdtransError, nearest

if TYPE_CHECKING:
    from cdtrans.methods.base import Method

METHODS = {  # name -> module and class, in the order of `cdtrans methods`
    "cdtrans": "cdtrans.methods.cdtrans:CDTrans",
    "dann": "cdtrans.methods.dann:DANN",
    "mcd": "cdtrans.methods.mcd:MCD",
    "rpll": "cdtrans.methods.rpll:RPLL",
    "mrkld_lrent": "cdtrans.methods.mrkld_lrent:MRKLDLRENT",
}
WITH_TARGET_LABELS = ("ground_truth", "sampled_pairs")  # only `cdtrans ablate` has these: cdtrans.paper.known_pairs


def require_method(name: str) -> None:
    """Refuse a method that does not exist. A class in a file of the user's is looked for when it is loaded."""
    if name in WITH_TARGET_LABELS:
        raise CdtransError(
            f"The method '{name}' trains on target labels, which 'adapt' never reads; see 'cdtrans ablate --help'."
        )
    if is_file(name):
        file = name.rpartition(":")[0]
        if not Path(file).is_file():
            raise CdtransError(f"There is no file '{file}' with a method in it; check --method.")
    elif name not in METHODS:
        raise CdtransError(f"Unknown method '{name}': {nearest(name, list(METHODS))}")


def is_file(name: str) -> bool:
    """Whether a method is named as FILE.py:CLASS."""
    return name.rpartition(":")[0].endswith(".py")


def method_class(name: str) -> "type[Method]":
    """The class of a method, by its name or as FILE.py:CLASS."""
    require_method(name)
    if is_file(name):
        return _class_in_file(*name.rsplit(":", 1))
    module, _, attribute = METHODS[name].partition(":")
    loaded: type[Method] = getattr(import_module(module), attribute)
    return loaded


def _class_in_file(file: str, attribute: str) -> "type[Method]":
    from cdtrans.methods.base import Method

    spec = importlib.util.spec_from_file_location(f"cdtrans_method_{Path(file).stem}", file)
    assert spec is not None, "the name ends in .py"
    assert spec.loader is not None, "the name ends in .py"
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the user's code raises
        cause = f"{type(error).__name__}: {error}"
        raise CdtransError(f"The method file '{file}' cannot be imported ({cause}); correct it.") from error
    candidate: Any = getattr(module, attribute, None)
    methods = [name for name, value in vars(module).items() if _is_method(value, Method) and value is not Method]
    if not _is_method(candidate, Method):
        hint = nearest(attribute, methods) if methods else "a method is a subclass of cdtrans.methods.base.Method."
        raise CdtransError(f"'{file}' has no method '{attribute}': {hint}")
    return candidate  # type: ignore[no-any-return]


def _is_method(value: Any, base: type) -> bool:
    return isinstance(value, type) and issubclass(value, base)
