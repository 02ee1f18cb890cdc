"""The built-in task end to end, in the same way as any two folders."""

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from typing_extensions import Unpack

from cdtrans.config import Settings, make_config
from cdtrans.errors import SettingsError
from cdtrans.measure.measured import evaluate
from cdtrans.record.record import RunRecord
from cdtrans.run.pipeline import adapt
from cdtrans.runtime.ranks import launched_world
from cdtrans.runtime.screen import Screen
from cdtrans.schema import Help


@dataclass(frozen=True)
class DemoResult:
    run: Path
    source_only_accuracy: float
    adapted_accuracy: float  # accuracy of the chosen model
    harm: bool  # whether the guard chose the source-only one

    def summary(self) -> dict[str, Any]:
        """The promised keys of `demo --json`."""
        return asdict(self) | {"run": str(self.run)}


def demo(
    out: Annotated[Path, Help("The run folder.", flag="--out")] = Path("runs/demo"),
    *,
    screen: Screen,
    **settings: Unpack[Settings],
) -> DemoResult:
    """Rendered digits to real handwriting. The labels are read after training, to print the score."""
    from cdtrans.inputs.digits import write_digits

    if launched_world() > 1:
        raise SettingsError(
            "demo-on-ranks",
            "The built-in task is too small for several processes; start 'cdtrans demo' in one process.",
        )
    place = Path(os.path.abspath(out))  # so that "." has a name
    seed = make_config({"seed": settings.get("seed", 0)}).seed
    digits = write_digits(place.with_name(f"{place.name}-data-{seed}"), seed=seed)
    report = settings.get("report", True)  # written after the evaluation, which it shows
    own: Settings = {**settings, "recipe": "demo", "seed": seed, "report": False}
    result = adapt(source=digits.source, target=digits.target, out=out, screen=screen, **own)
    measured = evaluate(result.run, digits.answers, screen=screen)
    if report:
        from cdtrans.reporting.page import write_report

        write_report(RunRecord(result.run), screen)
    return DemoResult(result.run, measured.models["source"].accuracy, measured.accuracy, result.harm)
