"""The part of a run that needs torch: resolve the settings, decode, fit the source, adapt to the target, conclude."""

import shutil
import time
from pathlib import Path
from typing import Any

import torch
import yaml

from cdtrans.config import Config, make_config, settle
from cdtrans.data.batches import Images, LabelledImages
from cdtrans.data.domains import LabelledDomain, UnlabelledDomain
from cdtrans.data.pixels import resize_for
from cdtrans.errors import CdtransError, Interrupted
from cdtrans.model.backbone import load_pretrained, load_weights, native_crop, resolve_name
from cdtrans.model.card import Card, build_model, load_model, make_card, save_model
from cdtrans.model.cross_attention import require_cross_attention
from cdtrans.model.fast.fused import build
from cdtrans.model.network import Network, require_no_batchnorm_on_ranks
from cdtrans.run.finish import conclude, show
from cdtrans.run.prepare import DomainPixels, Skipped, check_classes_left, check_data, decode_domain
from cdtrans.run.stage_1 import SOURCE, check_same_images, stage_1_for, take_source
from cdtrans.runtime.device import pick_device, pick_precision
from cdtrans.runtime.ranks import barrier, is_main, world
from cdtrans.runtime.screen import Screen
from cdtrans.runtime.signals import StopSignals
from cdtrans.storage.files import csv_line
from cdtrans.storage.run import Run, fingerprint
from cdtrans.storage.run_folder import CONFIG, RESULT, check_folder, read_result
from cdtrans.training.adaptation import Rearranged, adapt_to_target
from cdtrans.training.source import fit_source
from cdtrans.training.state import load_state, step_seed
from cdtrans.trust.findings import Finding
from cdtrans.trust.holdout import holdout_share, split, why_none


def run_session(
    config: Config,
    source: LabelledDomain,
    target: UnlabelledDomain,
    out: Path,
    screen: Screen,
    *,
    force: bool,
    rearranged: Rearranged | None,
    started: float,
) -> None:
    """From the images found to a finished run folder. Everything that can be wrong with the input is found before the
    folder is touched; `started` is when the session began, by the monotonic clock."""
    config = resolve(config)
    check_folder(out, config)
    if (out / RESULT).exists():
        screen.say(f"The run in '{out}' is already finished.")
        remove_state(out)  # there only if it was killed in its last moment, as may be the report's absence
        if config.report and is_main():
            add_report(out, screen)
        show(read_result(out), screen)
        return

    model, card = before_training(config, source.classes, out)
    require_no_batchnorm_on_ranks(model.backbone, config.backbone)
    if config.self_training == "none":
        require_cross_attention(model.backbone, config.backbone)
    if (out / CONFIG).exists():
        screen.say(f"Going on with the unfinished run in '{out}'; its settings are in {CONFIG} there.")
    else:
        screen.say(yaml.safe_dump(config.to_dict(), sort_keys=False).rstrip())
    source, source_pixels, source_bad = decode_domain(source, config, screen, "source")
    target, target_pixels, target_bad = decode_domain(target, config, screen, "target")
    check_classes_left(source)
    check_started = time.monotonic()
    findings = check_data(source, source_pixels, target, target_pixels, force=force, screen=screen)
    check_seconds = round(time.monotonic() - check_started, 3)
    source, source_pixels, held, held_pixels = hold_out(source, source_pixels, config, screen)
    if min(len(source), len(target), config.batch_size) < world():
        raise CdtransError(f"There are more processes ({world()}) than images or than --batch-size; start fewer.")

    data = describe(source, held, target)
    if config.source_model and not (out / SOURCE).exists():
        check_same_images(Path(config.source_model), config, data["source"])

    run = Run.open(out, config, data)
    try:
        with StopSignals.caught():
            device = torch.device(config.device)
            if device.type == "cuda":
                torch.cuda.set_device(device)  # streams and graphs are made on the current one
                if config.precision != "fp32" and (cause := build(device)[1]):
                    screen.warn(f"GPU kernels could not be built, so training takes twice as long ({cause}).")
            source_images = make_images(source_pixels, card, device)
            target_images = make_images(target_pixels, card, device)
            labels = torch.tensor(source.labels, device=device)
            holdout = None
            if held.labels:
                held_images = source_images.select(held_pixels.rows)
                holdout = LabelledImages(held_images, torch.tensor(held.labels, device=device))
            model.to(device)
            write_images(
                run,
                {
                    "source": (source.paths, source_pixels),
                    "holdout": (held.paths, held_pixels),
                    "target": (target.paths, target_pixels),
                },
            )
            begin_log(run, {"source": source_bad, "target": target_bad}, findings)
            run.log_timing(stage="check", seconds=check_seconds)
            train_source(run, model, source_images, labels, config, card, screen)
            adaptation = adapt_to_target(
                run, model, source_images, labels, target_images, holdout, config, screen, rearranged
            )
        result = conclude(run, model, card, target, adaptation, config)
        log_session(run, started)  # before the report, which tells it
        if config.report and run.writes:
            with run.timed("report"):
                from cdtrans.report.page import write_report

                screen.say(f"report: {write_report(out, screen)}")
        show(result, screen)
        remove_state(out)
        barrier()  # the others read the result that the main rank has written
    except Interrupted:
        log_session(run, started)
        raise
    finally:
        run.close()


def log_session(run: Run, started: float) -> None:
    """How long this session took, with all that no other line of timings.jsonl tells: imports, decoding, saving, ..."""
    run.log_timing(stage="session", seconds=round(time.monotonic() - started, 3))


def hold_out(
    source: LabelledDomain, pixels: DomainPixels, config: Config, screen: Screen
) -> tuple[LabelledDomain, DomainPixels, LabelledDomain, DomainPixels]:
    """The source to train on and the part that is only watched."""
    share = holdout_share(config.holdout, len(source), len(source.classes))
    train, held = split(source.labels, share, config.seed)
    if config.select == "holdout" and not held:
        raise CdtransError("'--select holdout' needs held-out source images; give --holdout 0.1 or another --select.")
    if config.holdout and not held:
        tell = screen.say if config.holdout == "auto" else screen.warn  # the one is as documented, the other a mistake
        tell(why_none(config.holdout, max(source.counts())))
    return source.keep(train), pixels.keep(train), source.keep(held), pixels.keep(held)


def resolve(config: Config) -> Config:
    """Every 'auto' replaced by what it means here; settings that do not go together are refused."""
    device = pick_device(config.device)
    backbone = resolve_name(config.backbone)
    crop = native_crop(backbone) if config.crop == "auto" else config.crop
    resize = resize_for(crop) if config.resize == "auto" else config.resize
    precision = pick_precision(config.precision, device)
    auto = {"device": str(device), "backbone": backbone, "crop": crop, "resize": resize, "precision": precision}
    return settle(make_config(config.to_dict() | auto))


def before_training(config: Config, classes: tuple[str, ...], out: Path) -> tuple[Network, Card]:
    """The model as this run gets it, and its card: with `--source-model` after another run's stage 1. A continuation
    has a copy of that, and of its own stage 1 once it is finished, so that the other run or the weights may go."""
    card = make_card(config, classes, stage="source", epoch=config.source_epochs)
    done = stage_1_for(out, config.source_model)
    if config.source_model and done:
        return take_source(done, card, config.drop_path)
    return initial_model(config, card, with_weights=done is None), card


def initial_model(config: Config, card: Card, *, with_weights: bool = True) -> Network:
    """The order of initialisation: seed, backbone, head, then the backbone's weights over it."""
    torch.manual_seed(step_seed(config.seed, "init", 0, 0))
    model = build_model(card, drop_path=config.drop_path)
    if with_weights and config.weights:
        load_weights(model.backbone, Path(config.weights))
    elif with_weights and config.pretrained:
        load_pretrained(model.backbone, config.backbone)
    return model


def make_images(found: DomainPixels, card: Card, device: torch.device) -> Images:
    return Images(found.pixels, found.rows, crop=card.crop, mean=card.mean, std=card.std, device=device)


def describe(source: LabelledDomain, held: LabelledDomain, target: UnlabelledDomain) -> dict[str, Any]:
    """The run's record of its data; a continuation must find the same."""
    return {
        "source": {
            "images": len(source),
            "held_out": len(held),
            "classes": dict(zip(source.classes, source.counts(), strict=True)),
            "fingerprint": fingerprint(source.root, source.paths, source.labels),
        },
        "target": {"images": len(target), "fingerprint": fingerprint(target.root, target.paths)},
    }


def begin_log(run: Run, skipped: dict[str, Skipped], findings: list[Finding]) -> None:
    """A fresh start logs first what is wrong with the data; a continuation has that in its log already."""
    if load_state(run) is None and not (run.folder / SOURCE).exists():
        run.cut_log(0)
        for domain, files in skipped.items():
            for path, cause in files.items():
                run.log("skipped", domain=domain, path=path, cause=cause)
        for finding in findings:
            run.log("check", state=finding.state, subject=finding.subject, found=finding.found)


def train_source(
    run: Run, model: Network, images: Images, labels: torch.Tensor, config: Config, card: Card, screen: Screen
) -> None:
    """Stage 1, or its result if it is there already: in this run's folder, or with `--source-model` in the model."""
    folder = run.folder / SOURCE
    if folder.exists():
        model.load_state_dict(load_model(folder)[0].state_dict())
        return
    if config.source_model:
        screen.say(f"stage 1 is that of '{config.source_model}' ({card.epoch} epochs from {card.weights})")
        run.log("source_model", run=config.source_model, epochs=card.epoch, weights=card.weights)
    else:
        fit_source(run, model, images, labels, config, screen)
    if run.writes:
        save_model(folder, model, card)


def write_images(run: Run, domains: dict[str, tuple[tuple[str, ...], DomainPixels]]) -> None:
    """images.csv: which image an index in pairs/ and predictions/ means, by its path and its pixels' digest."""
    lines = [csv_line(("domain", "index", "path", "digest"))]
    for name, (paths, pixels) in domains.items():
        for i, (path, digest) in enumerate(zip(paths, pixels.digests, strict=True)):
            lines.append(csv_line((name, i, path, digest)))
    run.write("images.csv", b"".join(lines))


def add_report(folder: Path, screen: Screen) -> None:
    """To a finished run that has none."""
    from cdtrans.report.page import NAME, write_report

    if not (folder / NAME).exists():
        write_report(folder, screen)


def remove_state(folder: Path) -> None:
    """A finished run needs no state to go on from; it is several times the size of the model."""
    if is_main():
        shutil.rmtree(folder / "state", ignore_errors=True)
