"""`cdtrans report`: a run folder as one self-contained HTML page."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from cdtrans.config import RunFolder
from cdtrans.errors import CdtransError, printable
from cdtrans.record import layout, wording
from cdtrans.record.files import atomic, intact
from cdtrans.record.outcome import Outcome
from cdtrans.record.probabilities import Kept
from cdtrans.record.record import RunRecord
from cdtrans.reporting import gallery, sections
from cdtrans.reporting.embedding import Embedding, embedding
from cdtrans.reporting.gallery import Gallery, Looks
from cdtrans.reporting.images import both_domains
from cdtrans.reporting.sections import Missing
from cdtrans.runtime import package_version
from cdtrans.runtime.screen import Screen
from cdtrans.schema import checked


@dataclass(frozen=True)
class Page:
    """What the template shows. A section without content is a Missing with the reason."""

    run: Path
    version: str
    outcome: Outcome
    headline: wording.Headline
    accuracy: wording.Accuracy
    facts: sections.Facts | Missing
    trade_off: tuple[Kept, ...] | Missing
    scores: tuple[sections.Score, ...] | Missing
    selection: sections.Curve | Missing
    losses: tuple[sections.Curve, ...] | Missing
    histogram: sections.Histogram | Missing
    about_pairs: str
    pair_counts: sections.PairCounts | Missing
    gallery: Gallery | Missing
    changed: Looks | Missing
    uncertain: Looks | Missing
    mislabelled: Looks | Missing
    embedding: Embedding | Missing
    labelled: sections.Labelled | Missing
    costs: sections.Costs | Missing
    config: dict[str, Any] | Missing
    environment: dict[str, Any] | Missing
    missing_files: int  # image files that are missing or unreadable now

    @property
    def adapted(self) -> bool:
        """Whether there is an adapted model to compare with the source-only one; the guard may have refused it."""
        return self.outcome.adapted_epoch > 0

    @property
    def used_source(self) -> bool:
        return self.outcome.choice.model == "source"


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


def collect(record: RunRecord, screen: Screen) -> Page:
    outcome = record.outcome
    labelled = attempt(sections.labelled, record)
    about = attempt(sections.about_pairs, record)
    about_pairs, together = (about.why, False) if isinstance(about, Missing) else about
    domains = attempt(both_domains, record)

    def shown(section: Callable[..., Section | Missing], *others: Any) -> Section | Missing:
        """A section with images."""
        return domains if isinstance(domains, Missing) else attempt(section, record, *domains, *others)

    pairs: Gallery | Missing = Missing("The two images of a pair need not belong together with this method.")
    if together:
        with screen.track("report", gallery.PAIRS) as task:
            pairs = shown(gallery.gallery, task)
    changed, uncertain = shown(gallery.changed), shown(gallery.uncertain)
    mislabelled = shown(gallery.mislabelled)
    return Page(
        run=record.folder,
        version=package_version("cdtrans"),
        outcome=outcome,
        headline=wording.headline(outcome),
        accuracy=wording.accuracy(outcome, None if isinstance(labelled, Missing) else labelled.measured, record.folder),
        facts=attempt(sections.facts, record),
        trade_off=attempt(sections.trade_off, record),
        scores=attempt(sections.scores, record),
        selection=attempt(sections.selection_curve, record),
        losses=attempt(sections.loss_curves, record),
        histogram=attempt(sections.histogram, record),
        about_pairs=about_pairs,
        pair_counts=attempt(sections.pair_counts, record),
        gallery=pairs,
        changed=changed,
        uncertain=uncertain,
        mislabelled=mislabelled,
        embedding=attempt(embedding, record),
        labelled=labelled,
        costs=attempt(sections.costs, record),
        config=attempt(lambda: record.config.to_dict()),
        environment=attempt(lambda: vars(record.environment)),
        missing_files=0 if isinstance(domains, Missing) else sum(domain.missing for domain in domains),
    )


Section = TypeVar("Section")


def attempt(make: Callable[..., Section | Missing], *arguments: Any) -> Section | Missing:
    """A section, or the error that prevents it: a damaged part of a run folder must not prevent the rest of the page,
    nor fail a long run at its end."""
    try:
        return make(*arguments)
    except CdtransError as error:
        return Missing(str(error))
    except Exception as error:
        return Missing(f"This part of the run folder cannot be shown ({type(error).__name__}: {error}).")


def render(page: Page) -> str:
    own = templates("reporting")
    own.tests["missing"] = lambda section: isinstance(section, Missing)
    own.filters |= {"percent": percent, "signed": signed, "plain": plain, "breakable": breakable}
    own.filters |= {"accuracy": wording.percent, "span": wording.span, "points": wording.points}
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


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f}%"


def signed(value: float, digits: int) -> str:
    """With a real minus sign, which is as wide as the plus."""
    return f"{value:+.{digits}f}".replace("-", "−")


def plain(value: Any) -> str:
    """A setting as written in a YAML file."""
    if isinstance(value, dict):
        return ", ".join(f"{key}: {plain(v)}" for key, v in value.items()) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value)


def breakable(name: str) -> Markup:
    """A name or path that may break after an underscore or a slash."""
    return escape(name).replace("_", Markup("_<wbr>")).replace("/", Markup("/<wbr>"))
