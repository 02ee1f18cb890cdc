"""Predictions as a table: CSV or Parquet. Either is made part by part; the parts are joined at the end."""

import io
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Protocol

from cdtrans.errors import CdtransError
from cdtrans.record.files import csv_lines
from cdtrans.serving.classifier import Classifier, Prediction


class Table(Protocol):
    """A format."""

    name: str

    def rows(self, predictions: Iterable[Prediction]) -> bytes:
        """A part of the table."""

    def join(self, file: IO[bytes], parts: Iterable[bytes]) -> None:
        """Write the table that consists of these parts."""


def column_names(classifier: Classifier, top: int) -> list[str]:
    """Path, label, probability, the score for no class if the classifier has one and, for top > 1, the best classes."""
    ranks = range(1, min(top, len(classifier.classes)) + 1) if top > 1 else ()
    unknown = ["no_class"] if classifier.source_only else []
    return [
        "path",
        "label",
        "probability",
        *unknown,
        *(f"{what}_{k}" for k in ranks for what in ("label", "probability")),
    ]


def fields(result: Prediction) -> list[str | float]:
    """In the order of the columns."""
    ranked = result.top if len(result.top) > 1 else ()
    unknown = [] if result.no_class is None else [result.no_class]
    return [str(result.path), result.label, result.probability, *unknown, *(x for pair in ranked for x in pair)]


class CsvTable:
    """Probabilities have six decimals, and a label that was left out is empty."""

    name = "csv"

    def __init__(self, columns: Sequence[str]) -> None:
        self.columns = columns

    def header(self) -> bytes:
        return csv_lines([self.columns])

    def rows(self, predictions: Iterable[Prediction]) -> bytes:
        return csv_lines([x if isinstance(x, str) else f"{x:.6f}" for x in fields(p)] for p in predictions)

    def join(self, file: IO[bytes], parts: Iterable[bytes]) -> None:
        file.write(self.header())
        file.writelines(parts)


class ParquetTable:
    """A row group for every part. Probabilities are float32, and a label that was left out is null."""

    name = "parquet"

    def __init__(self, columns: Sequence[str]) -> None:
        import pyarrow

        text = {name: name == "path" or name.startswith("label") for name in columns}
        types = [(name, pyarrow.string() if is_text else pyarrow.float32()) for name, is_text in text.items()]
        self.schema = pyarrow.schema(types)

    def rows(self, predictions: Iterable[Prediction]) -> bytes:
        import pyarrow
        from pyarrow import parquet

        columns: list[Sequence[Any]] = list(zip(*map(fields, predictions), strict=True))
        if not columns:
            return b""
        for n, name in enumerate(self.schema.names):
            if name == "path" or name.startswith("label"):
                columns[n] = [_text(x) or None for x in columns[n]]
        arrays = [pyarrow.array(x, kind) for x, kind in zip(columns, self.schema.types, strict=True)]
        file = io.BytesIO()
        parquet.write_table(pyarrow.Table.from_arrays(arrays, schema=self.schema), file)
        return file.getvalue()

    def join(self, file: IO[bytes], parts: Iterable[bytes]) -> None:
        from pyarrow import parquet

        with parquet.ParquetWriter(file, self.schema) as table:
            for part in filter(None, parts):
                table.write_table(parquet.read_table(io.BytesIO(part)))


def require_parquet(file: Path) -> None:
    if find_spec("pyarrow") is None:
        raise CdtransError(f"'{file}' needs pyarrow: 'pip install cdtrans[parquet]'.")


def _text(path: str) -> str:
    """Parquet holds only text: bytes of a name that are none are shown as \\xff."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
