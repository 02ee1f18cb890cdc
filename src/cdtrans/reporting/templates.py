"""HTML pages from templates. Inserted text is escaped and has no control characters."""

from functools import cache
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from cdtrans.errors import printable


@cache
def templates(*packages: str) -> Environment:
    """The templates of these packages of cdtrans. Compiling one takes half a second, so they are kept."""
    return Environment(
        loader=ChoiceLoader([PackageLoader("cdtrans", package) for package in packages]),
        autoescape=lambda name: name is not None and name.endswith(".html"),
        finalize=shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def shown(value: Any) -> Any:
    """Names of files and classes may hold characters that reverse the direction of text, or no printable ones."""
    return type(value)(printable(value, keep="\n\t")) if isinstance(value, str) else value
