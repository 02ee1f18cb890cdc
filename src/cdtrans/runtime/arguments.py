"""Arguments of the public functions: a value of a wrong type is one sentence, and not a TypeError from deep inside."""

import functools
import inspect
import os
import reprlib
from collections.abc import Callable
from numbers import Integral, Real
from pathlib import Path
from types import UnionType
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from cdtrans.errors import CdtransError

KINDS: dict[Any, tuple[type, str]] = {  # what is accepted for an annotation, and its name
    Path: (os.PathLike, "a path"),
    str: (str, "text"),
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    type(None): (type(None), ""),
}
Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


def checked(*others: str) -> Callable[[Callable[Parameters, Returned]], Callable[Parameters, Returned]]:
    """A decorator that compares the arguments of a function with their annotations. It leaves out `others`, and
    annotations with other types than paths, text and numbers."""

    def decorated(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
        @functools.wraps(function)
        def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
            hints = get_type_hints(function)
            try:
                given = inspect.signature(function).bind(*args, **kwargs).arguments
            except TypeError:
                given = {}  # Python's own error, of the call below, names the function
            for name, value in given.items():
                if name not in others:
                    require_kind(name, value, hints[name])
            return function(*args, **kwargs)

        return call

    return decorated


def require_kind(name: str, value: object, hint: Any) -> None:
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if not all(kind in KINDS for kind in kinds) or isinstance(value, tuple(KINDS[kind][0] for kind in kinds)):
        return
    expected = "a path" if Path in kinds else " or ".join(filter(None, (KINDS[kind][1] for kind in kinds)))
    raise CdtransError(f"'{name}' must be {expected}, not {reprlib.repr(value)}.")
