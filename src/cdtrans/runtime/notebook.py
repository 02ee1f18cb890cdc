"""Results as shown in a notebook: small, self-contained HTML, with all text escaped."""

from collections.abc import Sequence
from html import escape

from cdtrans.errors import printable

SHOWN = 20  # rows; a result has the others


def html_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *after: str) -> str:
    """A title, a table of the first rows, and sentences below it; empty ones are left out."""
    more = f"The first {SHOWN} of {len(rows)} rows." if len(rows) > SHOWN else ""
    head = "".join(f"<th>{_shown(name)}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(f'<td>{_shown(cell)}</td>' for cell in row)}</tr>" for row in rows[:SHOWN])
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if rows else ""
    below = "".join(f"<p>{_shown(text)}</p>" for text in (more, *after) if text)
    return f"<div><p><b>{_shown(title)}</b></p>{table}{below}</div>"


def _shown(text: str) -> str:
    """File names may hold bytes that are not text, and control characters."""
    return escape(printable(text.encode("utf-8", "backslashreplace").decode()))
