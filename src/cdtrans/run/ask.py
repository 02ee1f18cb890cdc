"""The verb `ask`: questions about the target of a finished run, or of one that is made first, without training."""

from pathlib import Path
from typing import Annotated, Any

from typing_extensions import Unpack

from cdtrans.config import Settings, SettingsFile
from cdtrans.errors import SettingsError
from cdtrans.measure.ask import Asked, ask_about
from cdtrans.record.record import RunRecord
from cdtrans.run.pipeline import adapt
from cdtrans.runtime.screen import Screen
from cdtrans.schema import Help, Range, checked

INSTANT: dict[str, Any] = {"effort": "instant", "report": False}  # no training, and nothing but questions


@checked()
def ask(  # type: ignore[misc]  # a setting is named seed too
    run: Annotated[str | Path, Help("A finished run folder; or, before TARGET, labelled source images.", "RUN")],
    target: Annotated[str | Path | None, Help("Unlabelled target images, to ask about before any run.")] = None,
    *,
    budget: Annotated[
        int, Help("How many images to label; three in five measure the accuracy."), Range(minimum=1)
    ] = 50,
    out: Annotated[
        str | Path | None, Help("Folder for the files (default: RUN/ask); with TARGET the run folder (runs/ask).")
    ] = None,
    seed: Annotated[int, Help("Seed of the random part."), Range(minimum=0)] = 0,
    force: Annotated[bool, Help("Replace answers that 'answer' has not read.")] = False,
    config: SettingsFile = None,
    quiet: bool = False,
    screen: Screen | None = None,
    **settings: Unpack[Settings],
) -> Asked:
    """Write a page with questions about the target: which classes occur, which images belong to none of them, and
    labels for `budget` images. What has been answered is not asked again. With a `target` a run is made first, without
    training, from the source images in `run`; `config` and `settings` are its settings."""
    screen, folder = screen or Screen(quiet=quiet), None if out is None else Path(out)
    if target is None:
        if config is not None or settings:
            raise SettingsError(
                "settings-without-target", "Settings are for 'cdtrans ask SOURCE TARGET'; a finished run has its own."
            )
        return ask_about(RunRecord(Path(run)), folder, screen, budget=budget, seed=seed, force=force)
    place = folder or Path("runs/ask")
    screen.say(f"First a run in '{place}' that trains nothing: it encodes every image once, then come the questions.")
    of_run: Any = INSTANT | dict(settings)
    made = adapt(run, target, out=place, config=config, screen=screen, **of_run)
    return ask_about(RunRecord(made.run), None, screen, budget=budget, seed=seed, force=force)
