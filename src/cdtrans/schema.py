"""The one validator: untyped values become typed ones by their type hints, or a Misfit names the place that is wrong.

    build(Outcome, json.loads(text))                a dataclass from JSON
    build(Config, {"lr": "1e-3"}, written=True)     ... from what a person wrote: YAML and flags
    check_value(value, dict[str, list[int]], "counts")    one value by any type hint
    @checked()                                      the arguments of a public function

Hints may be dataclasses, Literal, unions, list, tuple, dict, Sequence, Mapping, Path, str, int, float, bool, None, any
other class, and Annotated[..., Range(...)]; all others accept everything."""

import functools
import inspect
import os
import reprlib
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from cdtrans.errors import ArgumentTypeError, SettingsError, closest, ended, nearest

LARGEST = 1e300  # limit of every number: neither infinite nor NaN, and a float
LARGEST_COUNT, LARGEST_NUMBER = 10**9, 1e30  # limits of a setting that has no others; no sensible value comes near
NAMES: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path"}
NAMES |= dict.fromkeys((dict, Mapping), "a mapping") | dict.fromkeys((list, tuple, Sequence), "a list")

T = TypeVar("T")
Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


class Misfit(ValueError):
    """A value that does not fit its type hint: a sentence without its full stop. `place` is the key of the value, such
    as 'guard.findings'; `code` is one of kind, choice, range, empty, character, missing, unknown."""

    def __init__(self, code: str, place: str, sentence: str) -> None:
        super().__init__(sentence)
        self.code, self.place = code, place


@dataclass(frozen=True)
class Range:
    """The smallest and the largest accepted number: Annotated[int, Range(1, 4096)]."""

    minimum: float | None = None
    maximum: float | None = None


@dataclass(frozen=True)
class Help:
    """The help line of a public function's parameter: Annotated[int, Help("How many images to label.")]. A parameter
    that Python takes by position becomes an argument of the command, unless it has a `flag` here."""

    text: str
    metavar: str = ""
    flag: str = ""  # the flag, if it is not the parameter's name
    also: str = ""  # a hidden flag beside the argument


def option(default: Any, text: str, *, minimum: float | None = None, maximum: float | None = None) -> Any:
    """A field of a method's Options, with its help line and its range."""
    return field(default=default, metadata={"help": text, "range": Range(minimum, maximum)})


def build(kind: type[T], values: Any, place: str = "", *, written: bool = False, unknown: str = "There is no key") -> T:
    """A dataclass from a mapping. Unknown keys, and missing ones without a default, are refused. `written` values come
    from a person, who may write a number as text. `unknown` begins the sentence about an unknown key."""
    if not isinstance(values, Mapping):
        raise _unlike(dict, values, place)
    known = record_fields(kind)  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            names = nearest(str(key), list(known)) if known else "it has none"
            raise Misfit("unknown", _inside(place, key), f"{unknown} '{_inside(place, key)}': {names.rstrip('.')}")
    for key, (_, spec) in known.items():
        if key not in values and spec.default is MISSING and spec.default_factory is MISSING:
            raise Misfit("missing", _inside(place, key), f"'{_inside(place, key)}' is missing")
    made = {}
    for key, value in values.items():
        hint, spec = known[key]
        limits = spec.metadata.get("range", Range())
        made[key] = check_value(value, hint, _inside(place, key), written=written, limits=limits)
    return kind(**made)


def check_value(value: Any, hint: Any, place: str = "", *, written: bool = False, limits: Range = Range()) -> Any:
    """The value, converted where its type asks for it: lists to tuples, text to paths, mappings to dataclasses."""
    if written and value == "" and types.NoneType in alternatives(hint):
        raise Misfit("empty", place, f"'{place}' is empty; give a value, or leave it out")
    for kind in get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,):
        try:
            return _as_kind(value, kind, place, written, limits)
        except Misfit as misfit:
            if misfit.code not in ("kind", "choice") or misfit.place != place:
                raise
    raise _unlike(hint, value, place)


def checked(*others: str) -> Callable[[Callable[Parameters, Returned]], Callable[Parameters, Returned]]:
    """A decorator for public functions: arguments that do not fit their annotations are refused in one sentence.
    Arguments named in `others` are not checked."""

    def decorated(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
        @functools.wraps(function)
        def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
            hints = get_type_hints(function, include_extras=True)
            try:
                given = inspect.signature(function).bind(*args, **kwargs).arguments
            except TypeError:
                given = {}  # Python's own error, of the call below, names the function
            try:
                for name in [name for name in given if name in hints and name not in others]:
                    check_value(given[name], hints[name], name)
            except Misfit as misfit:
                kind = ArgumentTypeError if misfit.code == "kind" else SettingsError
                raise kind(f"argument-{misfit.code}", ended(str(misfit))) from None
            return function(*args, **kwargs)

        return call

    return decorated


@functools.cache
def record_fields(kind: type[Any]) -> dict[str, tuple[Any, Field[Any]]]:
    """The type hint and the field of every name in a dataclass."""
    hints = get_type_hints(kind, include_extras=True)
    return {spec.name: (hints[spec.name], spec) for spec in fields(kind) if spec.init}


def alternatives(hint: Any) -> list[Any]:
    """The types that a hint accepts, without what annotates them."""
    if get_origin(hint) is Annotated:
        return alternatives(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return [kind for each in get_args(hint) for kind in alternatives(each)]
    return [hint]


def short_repr(value: Any) -> str:
    """A value in an error message: short, and printable whatever it is."""
    try:
        return _short.repr(value)
    except ValueError:  # Python refuses to print a very large number
        return "a number of thousands of digits"


def _as_kind(value: Any, kind: Any, place: str, written: bool, limits: Range) -> Any:
    """The value as one of the alternatives of a union, or Misfit."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        ranges = [each for each in arguments[1:] if isinstance(each, Range)]
        return check_value(value, arguments[0], place, written=written, limits=ranges[0] if ranges else limits)
    if origin is Literal and type(value) in map(type, arguments) and value in arguments:
        return value
    if kind in (int, float):
        return _number(value, kind, place, written, limits)
    if kind is str and isinstance(value, os.PathLike) and written:
        value = os.fspath(value)
    if kind in (str, Path) and isinstance(value, str) and written and not _can_be_a_name(value):
        raise Misfit("character", place, f"'{place}' holds a character that no name can have: {short_repr(value)}")
    if kind is Path and isinstance(value, str | os.PathLike):
        return Path(value)
    if is_dataclass(kind) and isinstance(kind, type) and not isinstance(value, kind):
        return build(kind, value, place, written=written)
    if origin in (list, tuple, Sequence) and isinstance(value, list | tuple):
        return _items(value, origin, arguments, place, written)
    if origin in (dict, Mapping) and isinstance(value, dict):
        names = [check_value(key, arguments[0], _inside(place, key)) for key in value]
        made = [check_value(each, arguments[1], _inside(place, key), written=written) for key, each in value.items()]
        return dict(zip(names, made, strict=True))
    wanted = types.NoneType if kind is None else origin or kind
    checkable = isinstance(wanted, type) and wanted.__module__ != "typing"  # not Any, IO and the like
    text = wanted is Sequence and isinstance(value, str)
    if origin is Literal or text or (checkable and not isinstance(value, wanted)):
        raise _unlike(kind, value, place)
    return value


def _items(value: Sequence[Any], origin: Any, hints: tuple[Any, ...], place: str, written: bool) -> Any:
    if origin is not tuple or hints[-1:] == (...,):
        hints = (hints[0],) * len(value)
    if len(value) != len(hints):
        raise Misfit("kind", f"{place}[]", f"'{place}' must have {len(hints)} values, not {len(value)}")
    pairs = zip(value, hints, strict=True)
    made = [check_value(each, hint, f"{place}[{i}]", written=written) for i, (each, hint) in enumerate(pairs)]
    return tuple(made) if origin is tuple else made


def _number(value: Any, kind: Any, place: str, written: bool, limits: Range) -> Any:
    """YAML reads 1e-3 as text, so written text that looks like a number is one."""
    number: Any = value
    if written and not isinstance(value, int):  # a large int has no exact float
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            raise _unlike(kind, value, place) from None
        if kind is int and number.is_integer():
            number = int(number)
    fits: bool = isinstance(number, Integral if kind is int else Real) and not isinstance(value, bool)
    if not fits or number != number or abs(number) == float("inf"):
        raise _unlike(kind, value, place)
    widest = (LARGEST_COUNT if kind is int else LARGEST_NUMBER) if written else LARGEST
    most = widest if limits.maximum is None else limits.maximum
    least = -most if limits.minimum is None else limits.minimum
    if not least <= number <= most:
        limit = f"at least {least}" if number < least else f"at most {most}"
        raise Misfit("range", place, f"'{place}' must be {limit}, not {short_repr(value)}")
    return float(number) if written and kind is float else number


def _unlike(hint: Any, value: Any, place: str) -> Misfit:
    """The Misfit for a value of another type than its hint."""
    kinds = alternatives(hint)
    words = [str(word) for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    only_words = len(kinds) == 1  # otherwise 'known: auto' would hide that numbers are accepted too
    if words and isinstance(value, str) and (only_words or closest(value, words)):
        return Misfit("choice", place, f"'{place}' cannot be {short_repr(value)}: {nearest(value, words).rstrip('.')}")
    kinds = [kind for kind in kinds if kind is not types.NoneType and (kind is not str or Path not in kinds)]
    names = [NAMES.get(get_origin(kind) or kind) or getattr(kind, "__name__", "") for kind in kinds]
    wanted = " or ".join(dict.fromkeys([name for name in names if name not in ("", "Literal")] + words))
    subject = f"'{place}'" if place else "it"
    return Misfit("kind", place, f"{subject} must be {wanted or 'null'}, not {short_repr(value)}")


def _inside(place: str, key: object) -> str:
    return f"{place}.{key}" if place else str(key)


def _can_be_a_name(text: str) -> bool:
    """Whether it can be a file name. YAML can hold any character."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


_short = reprlib.Repr()
_short.maxstring, _short.maxother, _short.maxlong = 100, 60, 40
