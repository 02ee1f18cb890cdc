"""From two folders to an adapted classifier. Most mistakes are reported before torch and timm are imported, which takes
seconds."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typing_extensions import Unpack

from cdtrans.config import Config, Force, Settings, SettingsFile, Source, Target, compose_run, recipe_names
from cdtrans.inputs.scan import require_outside, warnings_for
from cdtrans.methods import require_method
from cdtrans.record import wording
from cdtrans.record.outcome import Outcome
from cdtrans.record.record import RunRecord
from cdtrans.record.run_folder import RESULT, check_folder
from cdtrans.run.inputs import scan_domains
from cdtrans.run.stage_1 import Stage1
from cdtrans.run.target_labels import Given
from cdtrans.runtime.screen import Screen, html_table
from cdtrans.runtime.signals import importing
from cdtrans.schema import Help, checked
from cdtrans.serving.classifier import Classifier, load

if TYPE_CHECKING:
    from cdtrans.methods.base import Method

DEFAULT_OUT = "runs/adapt"
# Where there is no SOURCE: with --source-model and --method shot.
TARGET_BY_FLAG = Help(
    "Folder with images at any depth, or a list of paths. Labels are not read.", "TARGET", also="--target"
)


@dataclass(frozen=True)
class Result:
    """What `adapt` returns."""

    run: Path
    outcome: Outcome

    @property
    def chosen_epoch(self) -> int:
        """The epoch of the chosen model; 0 for the source-only one."""
        return self.outcome.choice.epoch

    @property
    def harm(self) -> bool:
        """Whether the guard found harm, and nobody has chosen the adapted model since."""
        return self.outcome.harm

    @property
    def explanation(self) -> str:
        """The guard's verdict and evidence, in a paragraph."""
        return wording.explanation(self.outcome, self.run)

    @property
    def estimate(self) -> tuple[float, float] | None:
        """A range for the accuracy on the target; None if none can be given."""
        found = self.outcome.estimate
        return None if found is None else (found.low, found.high)

    @property
    def target_labels(self) -> int:
        """Target images that were trained with their labels (--target-labels)."""
        return self.outcome.target_labels

    def classifier(self) -> Classifier:
        return load(self.run)

    def summary(self) -> dict[str, Any]:
        """The promised keys of `adapt --json`."""
        names = ("chosen_epoch", "harm", "explanation", "estimate", "target_labels")
        return {"run": str(self.run)} | {name: getattr(self, name) for name in names}

    def _repr_html_(self) -> str:
        accuracy = "unknown" if self.estimate is None else "{:.0%} to {:.0%}".format(*self.estimate)
        chosen = wording.chosen_model(self.outcome.choice)
        rows = [("run folder", str(self.run)), ("chosen", chosen), ("estimated accuracy", accuracy)]
        if self.target_labels:
            rows.append(("target labels trained with", str(self.target_labels)))
        return html_table("Adaptation did harm" if self.harm else "Adapted", (), rows, self.explanation)


@checked()
def adapt(
    source: Source | None = None,
    target: Annotated[Target | None, TARGET_BY_FLAG] = None,
    *,
    out: Annotated[
        str | Path | None, Help("The run folder (default: runs/adapt); an unfinished run there is resumed.")
    ] = None,
    preset: Annotated[
        str | None, Help(f"A named set of settings (default: auto): {', '.join(recipe_names())}.", hidden=True)
    ] = None,
    config: SettingsFile = None,
    force: Force = False,
    quiet: bool = False,
    screen: Screen | None = None,
    **settings: Unpack[Settings],
) -> Result:
    """Adapt a classifier from labelled source images to unlabelled target images, into the run folder `out`.

    `settings` are the fields of `Config`; they override the YAML file `config`, which overrides the preset and may also
    name `out` and `preset`. A run folder with an unfinished run of the same settings is resumed. Data that makes a run
    pointless is refused, unless `force` is given."""
    chosen, named_out = compose_run(source, target, preset, config, dict(settings))
    place = Path(out or named_out or DEFAULT_OUT)
    return run_pipeline(chosen, place, screen or Screen(quiet=quiet), force=force)


def run_pipeline(
    config: Config, out: Path, screen: Screen, *, force: bool = False, method: "type[Method] | None" = None
) -> Result:
    """The whole run. `method` replaces the class that the configuration names, for ablations whose pairs are made with
    target labels."""
    started = time.monotonic()
    if method is None:
        require_method(config.method)
    classes: tuple[str, ...] = ()
    if not config.source:
        config, classes = Stage1(out, config).without_source()
    source, target = scan_domains(config, screen, classes)
    require_outside(out, *(Path(place) for place in (config.source, config.target) if place))
    for finding, advice in warnings_for(source):
        screen.warn(f"{finding}. {advice}")
    Given.require(config, source.classes)
    check_folder(out, config, resolved=False)
    finished = (out / RESULT).exists()
    if not finished:
        Stage1(out, config).require()
    with importing():
        from cdtrans.run.session import run_session
        from cdtrans.runtime.ranks import joined

    with joined(config.device):
        run_session(config, source, target, out, screen, force=force, method=method, started=started)
    return Result(out, RunRecord(out).outcome)
