"""What a JSON file of a run must look like. A value of another type would otherwise fail far from where it was read,
with a message that nobody can act on."""

from collections.abc import Collection
from typing import Any

LARGEST = 1e300  # of a number: neither infinite nor NaN, and a float
# A type; None; a tuple of alternatives; a list of one, for a list of such; a dictionary, for a mapping of which these
# keys are checked if they are there; a range, for a whole number in it; or a set, for a word in it.
Shape = Any


class Misfit(ValueError):
    """A value of another shape than it should have; the text says which."""


def require(value: Any, shape: Shape, *, needs: Collection[str] = ()) -> None:
    """Raise Misfit if a value has another shape, or if a mapping lacks one of these keys."""
    if wrong := _misfit(value, shape, ""):
        raise Misfit(wrong)
    if missing := [key for key in needs if key not in value]:
        raise Misfit(f"'{missing[0]}' is missing")


def _misfit(value: Any, shape: Shape, name: str) -> str:
    """Which part of a value has another shape, as 'guard.findings is 5'; empty if none has."""
    if isinstance(shape, dict) and isinstance(value, dict):
        parts = (_misfit(value[key], shape[key], f"{name}.{key}" if name else key) for key in shape if key in value)
        return next(filter(None, parts), "")
    if isinstance(shape, list) and isinstance(value, list):
        return next(filter(None, (_misfit(each, shape[0], name) for each in value)), "")
    fits = any(not _misfit(value, each, "") for each in shape) if isinstance(shape, tuple) else _is(value, shape)
    return "" if fits else f"{name or 'it'} is {repr(value)[:40]}"


def _is(value: Any, shape: Shape) -> bool:
    if shape in (None, bool, str, dict, list, object):
        return value is None if shape is None else isinstance(value, shape)
    if shape in (int, float):
        number = isinstance(value, int if shape is int else int | float) and not isinstance(value, bool)
        return number and abs(value) < LARGEST
    if isinstance(shape, dict | list):  # and the value is not one
        return False
    return type(value) is (int if isinstance(shape, range) else str) and value in shape
