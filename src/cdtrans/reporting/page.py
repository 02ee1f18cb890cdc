"""`cdtrans report`: a run folder as one self-contained HTML page."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from cdtrans.config import RunFolder
from cdtrans.errors import CdtransError, printable
from cdtrans.record import layout, wording
from cdtrans.record.files import atomic, intact
from cdtrans.record.record import RunRecord
from cdtrans.reporting import gallery, sections
from cdtrans.reporting.embedding import embedding
from cdtrans.reporting.images import run_images
from cdtrans.reporting.sections import Missing
from cdtrans.runtime import package_version
from cdtrans.runtime.screen import Screen
from cdtrans.schema import checked


@checked()
def report(run: RunFolder, *, quiet: bool = False, screen: Screen | None = None) -> Path:
    """Write the one-page report of a finished run: verdict, scores, pairs, images, cost. Returns the file,
    RUN/report.html."""
    return write_report(RunRecord(Path(run)), screen or Screen(quiet=quiet))


def write_report(record: RunRecord, screen: Screen) -> Path:
    """Write RUN/report.html, complete or not at all."""
    page = collect(record, screen)
    with intact(record.folder, layout.RESTORE):  # most damage only costs a section
        content = render(page)
    file = record.folder / layout.REPORT.name
    with atomic(file) as out:
        out.write(content.encode("utf-8", "backslashreplace"))  # names may contain undecodable bytes
    return file


def collect(record: RunRecord, screen: Screen) -> dict[str, Any]:
    """The values that the template shows. A section without content is a Missing with the reason."""
    outcome = record.outcome
    made = {
        "about_pairs": attempt(sections.about_pairs, record),
        "config": attempt(lambda: record.config.to_dict()),
        "costs": attempt(sections.stage_times, record),
        "embedding": attempt(embedding, record),
        "environment": attempt(lambda: vars(record.environment)),
        "facts": attempt(sections.run_size, record),
        "histogram": attempt(sections.histogram, record),
        "labelled": attempt(sections.label_results, record),
        "losses": attempt(sections.loss_curves, record),
        "pair_counts": attempt(sections.pair_counts, record),
        "scores": attempt(sections.scores, record),
        "selection": attempt(sections.selection_curve, record),
        "trade_off": attempt(sections.confident_labels, record),
        **with_images(record, screen),
    }
    labelled = made["labelled"]
    measured = None if isinstance(labelled, Missing) else labelled["measured"]
    if (refuted := outcome.contradicted_by(measured)) and record.calibrated_with() != "labels":
        made["trade_off"] = Missing("Labels refute the estimate that the probabilities follow.")
    return made | {
        "run": record.folder,
        "version": package_version("cdtrans"),
        "outcome": outcome,
        "adapted": outcome.adapted_epoch > 0,  # the guard may have refused it
        "used_source": outcome.choice.model == "source",
        "headline": wording.headline(outcome, measured),
        "refuted": refuted,
        "accuracy": wording.accuracy(outcome, measured, record.folder),
    }


def with_images(record: RunRecord, screen: Screen) -> dict[str, Any]:
    """The sections that show images, and how many of their files are missing."""
    both = attempt(run_images, record)
    if isinstance(both, Missing):
        names = ("gallery", "changed", "uncertain", "strangers", "absent", "mislabelled")
        return dict.fromkeys(names, both) | {"missing_files": 0}
    source, target = both
    made = {
        "gallery": attempt(gallery.gallery, record, source, target, screen),
        "changed": attempt(gallery.changed, record, target),
        "uncertain": attempt(gallery.uncertain, record, target),
        "strangers": attempt(gallery.strangers, record, target),
        "absent": attempt(gallery.absent, record, target),
        "mislabelled": attempt(gallery.doubtful_labels, record, source),
    }
    return made | {"missing_files": source.missing + target.missing}


def attempt(make: Callable[..., Any], *arguments: Any) -> Any:
    """A section, or the error that prevents it: a damaged part of a run folder must not prevent the rest of the page,
    nor fail a long run at its end."""
    try:
        return make(*arguments)
    except CdtransError as error:
        return Missing(str(error))
    except Exception as error:
        return Missing(f"This part of the run folder cannot be shown ({type(error).__name__}: {error}).")


def render(page: dict[str, Any]) -> str:
    own = templates("reporting")
    own.tests["missing"] = lambda section: isinstance(section, Missing)
    own.filters |= {"accuracy": wording.accuracy_percent, "span": wording.span, "points": wording.points}
    own.filters |= {"percent": percentage, "setting": setting, "breakable": breakable}
    return own.get_template("template.html").render(page=page, wording=wording)


@cache
def templates(*packages: str) -> Environment:
    """The templates of these packages of cdtrans: text is escaped and has no control characters. Compiling one takes
    half a second, so they are kept."""
    return Environment(
        loader=ChoiceLoader([PackageLoader("cdtrans", package) for package in packages]),
        autoescape=lambda name: name is not None and name.endswith(".html"),
        finalize=visible,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def visible(value: Any) -> Any:
    """Names of files and classes may hold characters that reverse the direction of text, or no printable ones."""
    return type(value)(printable(value, keep="\n\t")) if isinstance(value, str) else value


def percentage(share: float, digits: int = 0) -> str:
    return f"{share:.{digits}%}"


def setting(value: Any) -> str:
    """A setting as written in a YAML file."""
    if isinstance(value, dict):
        return ", ".join(f"{key}: {setting(v)}" for key, v in value.items()) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value)


def breakable(name: str) -> Markup:
    """A name or path that may break after an underscore or a slash."""
    return escape(name).replace("_", Markup("_<wbr>")).replace("/", Markup("/<wbr>"))
