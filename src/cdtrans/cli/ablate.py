"""The functions of `cdtrans ablate`. TODO: they move to studies, where their work is."""

from pathlib import Path
from typing import Annotated, Any

from typing_extensions import Unpack

from cdtrans.config import DeviceName, Force, Jobs, Preset, Root, RunFolder, Settings, SettingsFile, Source, Target
from cdtrans.runtime.screen import Screen
from cdtrans.schema import Help, Range

Key = Annotated[Path, Help("Target labels, for scores after training: TARGET with its labels.", "LABELLED")]
Folder = Annotated[Path, Help("Folder for the runs and the table; resumed if it exists.", "DIR")]


def losses(
    source: Source,
    target: Target,
    *,
    key: Key,
    out: Folder,
    preset: Preset = None,
    config: SettingsFile = None,
    force: Force = False,
    jobs: Jobs = 1,
    screen: Screen,
    **settings: Unpack[Settings],
) -> Any:
    from cdtrans.paper.ablation_rows import LOSSES
    from cdtrans.paper.ablations import ablate

    how: dict[str, Any] = {"preset": preset, "config": config, "force": force, "jobs": jobs, "screen": screen}
    return ablate(LOSSES, Path(source), Path(target), key=key, out=out, **how, **settings)


def pseudo_labels(
    source: Source,
    target: Target,
    *,
    key: Key,
    out: Folder,
    preset: Preset = None,
    config: SettingsFile = None,
    force: Force = False,
    jobs: Jobs = 1,
    screen: Screen,
    **settings: Unpack[Settings],
) -> Any:
    from cdtrans.paper.ablation_rows import PSEUDO_LABELS
    from cdtrans.paper.ablations import ablate

    how: dict[str, Any] = {"preset": preset, "config": config, "force": force, "jobs": jobs, "screen": screen}
    return ablate(PSEUDO_LABELS, Path(source), Path(target), key=key, out=out, **how, **settings)


def noise(
    source: Source,
    target: Target,
    *,
    key: Annotated[Path, Help("Target labels, for pairs and scores: TARGET with its labels.", "LABELLED")],
    out: Annotated[Path, Help("Folder for the runs and the plot; resumed if it exists.", "DIR")],
    levels: Annotated[str, Help("Shares of false pairs, in percent.")] = "0,20,40,60,80,100",
    pairs: Annotated[int | None, Help("Pairs to sample (default: one per target image)."), Range(minimum=2)] = None,
    seeds: Annotated[str, Help("How many seeds (3: 1234, 1 and 2), or a list: 1234,1.")] = "1",
    preset: Preset = None,
    config: SettingsFile = None,
    force: Force = False,
    jobs: Jobs = 1,
    screen: Screen,
    **settings: Unpack[Settings],
) -> Any:
    from cdtrans.paper.noise import ablate_noise

    how: dict[str, Any] = {"preset": preset, "config": config, "force": force, "jobs": jobs, "screen": screen}
    how |= {"levels": levels, "pairs": pairs, "seeds": seeds}
    return ablate_noise(Path(source), Path(target), key=key, out=out, **how, **settings)


def attention(
    run: RunFolder,
    *,
    out: Annotated[Path, Help("The figure, a PNG.", "FILE")],
    key: Annotated[Path | None, Help("The run's target with its labels. Finds false pairs.", "LABELLED")] = None,
    pairs: Annotated[int, Help("How many false pairs to show at most."), Range(1, 100)] = 8,
    pair: Annotated[
        list[str] | None, Help("Show this pair (paths as in images.csv); may be repeated.", "SOURCE,TARGET")
    ] = None,
    root: Root = None,
    device: DeviceName = "auto",
) -> Any:
    from cdtrans.paper.attention_figure import draw_attention

    place = None if root is None else Path(root)
    return draw_attention(Path(run), key, out, pairs=pairs, chosen=pair or (), root=place, device=device)


def with_key(
    source: Source,
    target: Target,
    *,
    key: Key,
    out: Annotated[Path, Help("The run folder.")],
    preset: Preset = None,
    config: SettingsFile = None,
    force: Force = False,
    screen: Screen,
    **settings: Unpack[Settings],
) -> Any:
    from cdtrans.paper.known_pairs import adapt_with_labels

    how: dict[str, Any] = {"preset": preset, "config": config, "force": force, "screen": screen}
    return adapt_with_labels(Path(source), Path(target), key=key, out=out, **how, **settings)
