"""The page itself: a run folder as one self-contained HTML file."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from markupsafe import Markup, escape

from cdtrans.record.files import atomic, intact
from cdtrans.record.layout import RESTORE
from cdtrans.record.probabilities import Kept
from cdtrans.reporting import gallery as galleries
from cdtrans.reporting import sections
from cdtrans.reporting.answer import Answer, answer, points, shown, span
from cdtrans.reporting.costs import Costs, costs
from cdtrans.reporting.embedding import Embedding, embedding
from cdtrans.reporting.gallery import Gallery, Looks
from cdtrans.reporting.pictures import SIDE, Pictures
from cdtrans.reporting.record import Record, read_record
from cdtrans.reporting.sections import Missing
from cdtrans.reporting.target_labels import LabelledResults, labelled_results
from cdtrans.reporting.templates import templates
from cdtrans.runtime.environment import package_version
from cdtrans.runtime.screen import Screen

NAME = "report.html"


@dataclass(frozen=True)
class Page:
    """What the template shows. A section without content is a Missing with the reason."""

    record: Record
    version: str
    answer: Answer
    verdict: sections.Verdict
    estimate: sections.Estimate | Missing
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
    labelled: LabelledResults | Missing
    costs: Costs | Missing
    missing_files: int  # image files that are missing or unreadable now


def write_report(run: Path, screen: Screen) -> Path:
    """Write RUN/report.html, complete or not at all."""
    file = run / NAME
    record = read_record(run)
    with intact(run, RESTORE):  # most damage only costs a section
        content = render(collect(record, screen))
    with atomic(file) as out:
        out.write(content.encode("utf-8", "backslashreplace"))  # names may contain undecodable bytes
    return file


def collect(record: Record, screen: Screen) -> Page:
    crop, resize = int(record.config.get("crop", SIDE)), int(record.config.get("resize", SIDE))
    source = Pictures(record.root("source"), record.source, resize=resize, crop=crop)
    target = Pictures(record.root("target"), record.target, resize=resize, crop=crop)
    gallery: Gallery | Missing = Missing("The two images of a pair need not belong together with this method.")
    if sections.pairs_belong_together(record):
        with screen.track("report", galleries.PAIRS) as task:
            gallery = attempt(galleries.gallery, record, source, target, task)
    changed, uncertain = attempt(galleries.changed, record, target), attempt(galleries.uncertain, record, target)
    mislabelled = attempt(galleries.mislabelled, record, source)
    estimate, labelled = attempt(sections.estimate, record), attempt(labelled_results, record)
    return Page(
        record=record,
        version=package_version("cdtrans"),
        answer=answer(record, estimate, labelled),
        verdict=sections.verdict(record),
        estimate=estimate,
        trade_off=attempt(sections.trade_off, record),
        scores=attempt(sections.scores, record),
        selection=attempt(sections.selection_curve, record),
        losses=attempt(sections.loss_curves, record),
        histogram=attempt(sections.histogram, record),
        about_pairs=sections.about_pairs(record),
        pair_counts=attempt(sections.pair_counts, record),
        gallery=gallery,
        changed=changed,
        uncertain=uncertain,
        mislabelled=mislabelled,
        embedding=attempt(embedding, record),
        labelled=labelled,
        costs=attempt(costs, record),
        missing_files=source.missing + target.missing,
    )


Section = TypeVar("Section")


def attempt(make: Callable[..., Section | Missing], *arguments: Any) -> Section | Missing:
    """A section, or the error that prevents it: a damaged part of a run folder must not prevent the rest of the page,
    nor fail a long run at its end."""
    try:
        return make(*arguments)
    except Exception as error:
        return Missing(f"This part of the run folder cannot be shown ({type(error).__name__}: {error}).")


def render(page: Page) -> str:
    own = templates("reporting")
    own.tests["missing"] = lambda section: isinstance(section, Missing)
    own.filters |= {"percent": percent, "signed": signed, "plain": plain, "breakable": breakable}
    own.filters |= {"accuracy": shown, "span": span, "points": points}
    return own.get_template("template.html").render(page=page)


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
