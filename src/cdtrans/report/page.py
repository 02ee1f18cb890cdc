"""The page itself: what a run folder tells, in one file that needs nothing else."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from cdtrans.report import gallery as galleries
from cdtrans.report import sections
from cdtrans.report.answers import Answers, answers
from cdtrans.report.costs import Costs, costs
from cdtrans.report.embedding import Embedding, embedding
from cdtrans.report.gallery import Gallery, Looks
from cdtrans.report.pictures import SIDE, Pictures
from cdtrans.report.record import Record, read_record
from cdtrans.report.sections import Missing
from cdtrans.runtime.environment import package_version
from cdtrans.runtime.screen import Screen
from cdtrans.storage.files import atomic

NAME = "report.html"


@dataclass(frozen=True)
class Page:
    """What the template shows. A section that is not there is a Missing, with the reason."""

    record: Record
    version: str
    verdict: sections.Verdict
    estimate: sections.Estimate | Missing
    scores: tuple[sections.Score, ...] | Missing
    curves: tuple[sections.Curve, ...] | Missing
    losses: tuple[sections.Curve, ...] | Missing
    histogram: sections.Histogram | Missing
    pair_counts: sections.PairCounts | Missing
    gallery: Gallery | Missing
    changed: Looks | Missing
    uncertain: Looks | Missing
    mislabelled: Looks | Missing
    embedding: Embedding | Missing
    answers: Answers | Missing
    costs: Costs | Missing
    gone: int  # image files that have vanished since the run


def write_report(run: Path, screen: Screen) -> Path:
    """RUN/report.html, whole or not at all."""
    file = run / NAME
    content = render(collect(read_record(run), screen))
    with atomic(file) as out:
        out.write(content.encode("utf-8", "backslashreplace"))  # names may hold bytes that are no text
    return file


def collect(record: Record, screen: Screen) -> Page:
    crop, resize = int(record.config.get("crop", SIDE)), int(record.config.get("resize", SIDE))
    source = Pictures(record.root("source"), record.source, resize=resize, crop=crop)
    target = Pictures(record.root("target"), record.target, resize=resize, crop=crop)
    with screen.track("report", galleries.PAIRS) as task:
        gallery = attempt(galleries.gallery, record, source, target, task)
    changed, uncertain = attempt(galleries.changed, record, target), attempt(galleries.uncertain, record, target)
    mislabelled = attempt(galleries.mislabelled, record, source)
    return Page(
        record=record,
        version=package_version("cdtrans"),
        verdict=sections.verdict(record),
        estimate=attempt(sections.estimate, record),
        scores=attempt(sections.scores, record),
        curves=attempt(sections.score_curves, record),
        losses=attempt(sections.loss_curves, record),
        histogram=attempt(sections.histogram, record),
        pair_counts=attempt(sections.pair_counts, record),
        gallery=gallery,
        changed=changed,
        uncertain=uncertain,
        mislabelled=mislabelled,
        embedding=attempt(embedding, record),
        answers=attempt(answers, record),
        costs=attempt(costs, record),
        gone=source.gone + target.gone,
    )


Section = TypeVar("Section")


def attempt(make: Callable[..., Section | Missing], *arguments: Any) -> Section | Missing:
    """A section, or what is wrong with it: whatever people or a full disk did to a run folder, the rest of the page is
    worth having, and a report must not spoil the end of a long run."""
    try:
        return make(*arguments)
    except Exception as error:
        return Missing(f"This part of the run folder cannot be shown ({type(error).__name__}: {error}).")


def render(page: Page) -> str:
    templates = Environment(
        loader=PackageLoader("cdtrans", "report"),
        autoescape=lambda name: name is not None and name.endswith(".html"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.tests["missing"] = lambda section: isinstance(section, Missing)
    templates.filters |= {"percent": percent, "signed": signed, "plain": plain, "breakable": breakable}
    return templates.get_template("template.html").render(page=page)


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f}%"


def signed(value: float, digits: int) -> str:
    """With a true minus sign, which is as wide as the plus."""
    return f"{value:+.{digits}f}".replace("-", "−")


def plain(value: Any) -> str:
    """A setting as one would write it in the YAML file."""
    if isinstance(value, dict):
        return ", ".join(f"{key}: {plain(v)}" for key, v in value.items()) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value)


def breakable(name: str) -> Markup:
    """A name or path that may go on in the next line after an underscore or a slash."""
    return escape(name).replace("_", Markup("_<wbr>")).replace("/", Markup("/<wbr>"))
