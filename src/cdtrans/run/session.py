"""The part of a run that needs torch: resolve the settings, decode, fit the source, adapt to the target, finish."""

import hashlib
import shutil
import time
from dataclasses import replace
from pathlib import Path

import torch

from cdtrans.config import Config, check_options, is_method_file
from cdtrans.errors import CdtransError, Interrupted, counted
from cdtrans.inputs.batches import LabelledImages
from cdtrans.inputs.scan import LabelledDomain, UnlabelledDomain
from cdtrans.methods import method_class
from cdtrans.methods.base import Method, Sizes
from cdtrans.network.encoding import Encoder, Frozen
from cdtrans.network.network import AnyHead, Network, require_no_batchnorm_on_ranks
from cdtrans.network.operations import build
from cdtrans.record.files import csv_line
from cdtrans.record.record import RunRecord
from cdtrans.record.run import Run
from cdtrans.record.run_folder import CONFIG, RESULT, check_folder
from cdtrans.run.evidence import evidence_network, left_untouched, pretrained_evidence
from cdtrans.run.finish import judge, save, show
from cdtrans.run.inputs import Inputs, decode_inputs, fingerprints
from cdtrans.run.resolve import require_source, resolve
from cdtrans.run.stage_1 import Stage1
from cdtrans.run.target_labels import Given
from cdtrans.runtime.device import between_passes
from cdtrans.runtime.ranks import barrier, from_main, is_main, world
from cdtrans.runtime.screen import Screen
from cdtrans.runtime.signals import StopSignals
from cdtrans.training.adaptation import Data, adapt_to_target, work_ahead
from cdtrans.training.reporting import library
from cdtrans.training.state import load_state, step_seed

STOPPING = "Stopping after the current step, to save the state; press Ctrl-C again to stop at once."


def run_session(
    settings: Config,
    source: LabelledDomain,
    target: UnlabelledDomain,
    out: Path,
    screen: Screen,
    *,
    force: bool,
    method: type[Method] | None,
    started: float,
) -> None:
    """From the scanned images to a finished run folder. Bad input is found before the folder is touched. `started` is
    when the session began, by the monotonic clock. `method` replaces the class that the configuration names."""
    kind = method or method_class(settings.method)
    config = resolve(settings, kind)
    require_source(kind, config)
    Given.require_use(kind, config)
    check_folder(out, config)
    if from_main((out / RESULT).exists()):
        Given.warn_of_changes(out, config, source.classes, target, screen)
        show_finished(out, fingerprints(source, target), config, screen)
        return

    if config.tracker != "none":
        library(config.tracker)  # before the work, not after it
    stage_1 = Stage1(out, config)
    network, card = stage_1.network(config, source.classes)
    kind.check(network, config.backbone)
    require_no_batchnorm_on_ranks(network.backbone, config.backbone)
    resumed = (out / CONFIG).exists()
    if resumed:
        screen.say(f"Resuming the unfinished run in '{out}'; its settings are in {CONFIG} there.")
        warn_about_threads(out, config, screen)
    else:
        for line in opening(config, out, trains=kind.trains):
            screen.say(line)
    inputs = decode_inputs(config, kind, source, target, screen, force=force)
    if min(len(inputs.source) or len(inputs.target), len(inputs.target), config.batch_size) < world():
        raise CdtransError(f"There are more processes ({world()}) than images or than --batch-size; start fewer.")

    data = inputs.describe()
    if is_method_file(config.method):
        file = Path(config.method.rpartition(":")[0])
        data = replace(data, method=hashlib.sha256(file.read_bytes()).hexdigest())
    stage_1.require_same_images(data.source)

    run = Run.open(out, config, data)
    if run.finished:
        run.close()
        show_finished(out, inputs.scanned, config, screen)
        return
    try:
        with StopSignals.caught("" if screen.quiet else STOPPING):
            device = torch.device(config.device)
            if device.type == "cuda":
                torch.cuda.set_device(device)  # streams and graphs are made on the current one
                if config.precision != "fp32" and (cause := build(device)[1]):
                    screen.warn(f"GPU kernels could not be built, so training takes twice as long ({cause}).")
            source_images = inputs.source.images(card, device)
            target_images = inputs.target.images(card, device)
            beside = between_passes(device)
            labels = torch.tensor(inputs.source.domain.labels, dtype=torch.long, device=beside)
            holdout = None
            if len(inputs.held_out):
                held_images = source_images.select(inputs.held_out.rows)
                holdout = LabelledImages(held_images, torch.tensor(inputs.held_out.domain.labels, device=beside))
            network.to(device)
            write_images(run, inputs)
            inputs.given.write(run, inputs.classes, inputs.target)
            begin_log(run, stage_1, inputs)
            run.log_timing(stage="check", seconds=inputs.check_seconds)
            untrained = network if stage_1.origin is None else None
            pretrained = evidence_network(run, untrained, card, config, device, screen)
            sizes = Sizes(len(inputs.classes), len(inputs.source), len(inputs.target))
            pairs = max(sizes.source_images, sizes.target_images) if kind.trains else 0  # until they are planned
            screen.work.expect(**work_ahead(config, sizes, len(inputs.held_out), pairs))
            frozen = Frozen() if config.source_fit == "probe" else None
            encode = Encoder(network, config, screen, frozen)
            evidence = pretrained_evidence(
                run, pretrained, sizes.classes, config, source_images, labels, target_images, screen
            )
            untouched = left_untouched(untrained, card, config)
            del pretrained  # another run's stage 1 has a backbone of its own, which would stay in memory
            stage_1.carry_out(run, encode, source_images, labels, card, screen)
            adapting = make_method(kind, network, config, sizes).to(device)
            training = Data(source_images, labels, target_images, holdout, inputs.given.tensors(beside), untouched)
            adaptation = adapt_to_target(run, adapting, training, config, screen, frozen, evidence)
        with run.timed("verdict"):
            outcome = judge(adaptation, config, kind, card.classes, len(inputs.given))
        save(run, adaptation, outcome, card, inputs.target.domain, config)
        log_session(run, started)  # before the report, which shows it
        if config.report and run.writes:
            with run.timed("report"):
                from cdtrans.reporting.page import write_report

                screen.say(f"report: {write_report(out, screen)}")
        show(out, outcome, screen)
        remove_state(out)
        barrier()  # the others read the result that the main rank has written
    except Interrupted:
        log_session(run, started)
        raise
    finally:
        run.close()


def log_session(run: Run, started: float) -> None:
    """Log how long this session took, including what no other line of timings.jsonl covers: imports, decoding, saving.
    On a GPU also the peak memory of its tensors."""
    memory = {"peak_memory": torch.cuda.max_memory_allocated()} if torch.cuda.is_initialized() else {}
    run.log_timing(stage="session", seconds=round(time.monotonic() - started, 3), **memory)


def make_method(kind: type[Method], network: Network, config: Config, sizes: Sizes) -> Method:
    """The run's seed initialises its modules. A model card must be able to describe the network that it serves."""
    torch.manual_seed(step_seed(config.seed, "method", 0, 0))
    method = kind(network, check_options(kind.Options, config.method_args, config.method), sizes)
    served, own = method.served(), {id(parameter) for parameter in method.parameters()}
    if not isinstance(served.head, AnyHead) or any(id(p) not in own for p in served.parameters()):
        raise CdtransError(
            f"{kind.__name__}.served() must return a Network made of the method's own modules, with a head of "
            "cdtrans.network.network; see docs/methods.md."
        )
    return method


def show_finished(out: Path, found: dict[str, str], config: Config, screen: Screen) -> None:
    """Say that a run is finished already, and whether its images have changed since."""
    screen.say(f"The run in '{out}' is already finished.")
    before = vars(RunRecord(out).data.scanned)
    changed = [name for name in found if before[name] != found[name]]
    if changed:
        screen.warn(
            f"The {' and '.join(changed)} images have changed since the run in '{out}' began, but its result is "
            "for the earlier ones; choose another --out to adapt to them, or label new images with 'cdtrans predict'."
        )
    remove_state(out)  # left over only if the run was killed at the very end, before its report was written
    if config.report and is_main():
        add_report(out, screen)
    show(out, RunRecord(out).outcome, screen)


def opening(config: Config, out: Path, *, trains: bool) -> list[str]:
    """What a run is about to do, in a few lines."""

    def epochs(count: int) -> str:
        return counted(count, "epoch")

    recipe = f"recipe {config.recipe}, effort {config.effort}" if config.recipe == "best" else f"recipe {config.recipe}"
    stage_1 = (
        "a probe on the source" if config.source_fit == "probe" else f"{epochs(config.source_epochs)} on the source"
    )
    if config.source_model:
        stage_1 = f"the source-only model of '{config.source_model}'"
    origin = "timm's weights" if config.pretrained else "from scratch"
    origin = f"weights of '{config.weights}'" if config.weights else origin
    stage_2 = f"{epochs(config.epochs)} of {config.method}" if trains else f"the method {config.method}, no training"
    return [
        f"{recipe}: {stage_1}, then {stage_2}",
        f"backbone {config.backbone} at {config.crop} pixels, {origin}",
        f"on {config.device} in {config.precision}, seed {config.seed}",
        f"all settings: {out / CONFIG}",
    ]


def warn_about_threads(out: Path, config: Config, screen: Screen) -> None:
    """On a CPU the number of threads decides how sums are rounded."""
    before, now = RunRecord(out).environment.threads, torch.get_num_threads()
    if config.device == "cpu" and before != now:
        screen.warn(
            f"The run began with {before} CPU threads and resumes with {now}, so its result will differ in the last "
            f"digits from that of an uninterrupted run; set OMP_NUM_THREADS={before} to avoid this."
        )


def begin_log(run: Run, stage_1: Stage1, inputs: Inputs) -> None:
    """A new run first logs the problems of its data; a resumed run has them in its log already."""
    if load_state(run) is None and not stage_1.done:
        run.cut_log(0)
        for domain, files in inputs.skipped.items():
            for path, cause in files.items():
                run.log("skipped", domain=domain, path=path, cause=cause)
        for finding in inputs.findings:
            run.log("check", state=finding.state, subject=finding.subject, found=finding.statement)


def write_images(run: Run, inputs: Inputs) -> None:
    """images.csv: the path and the pixels' digest of the image behind each index in pairs/ and predictions/."""
    lines = [csv_line(("domain", "index", "path", "digest"))]
    domains = (
        ("source", inputs.source.domain.paths, inputs.source.digests),
        ("holdout", inputs.held_out.domain.paths, inputs.held_out.digests),
        ("target", inputs.target.domain.paths, inputs.target.digests),
    )
    for name, paths, digests in domains:
        for i, (path, digest) in enumerate(zip(paths, digests, strict=True)):
            lines.append(csv_line((name, i, path, digest)))
    run.write("images.csv", b"".join(lines))


def add_report(folder: Path, screen: Screen) -> None:
    """Write the report of a finished run that has none."""
    from cdtrans.reporting.page import NAME, write_report

    if not (folder / NAME).exists():
        write_report(folder, screen)


def remove_state(folder: Path) -> None:
    """A finished run needs no state to resume from; it is several times the size of the model."""
    if is_main():
        shutil.rmtree(folder / "state", ignore_errors=True)
