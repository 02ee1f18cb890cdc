"""From two folders to an adapted classifier. Most mistakes are reported before torch and timm are imported, which takes
seconds."""

import time
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typing_extensions import Unpack

from cdtrans.config import (
    Config,
    Force,
    Resolved,
    Settings,
    SettingsFile,
    SourceArgument,
    TargetArgument,
    check_options,
    compose_run,
    is_method_file,
    make_config,
)
from cdtrans.errors import MethodError, SettingsError, counted
from cdtrans.inputs.decode import decoding_ahead
from cdtrans.inputs.pixels import resize_for
from cdtrans.inputs.scan import require_outside, warnings_for
from cdtrans.methods import METHODS, faults_named, method_class, require_method
from cdtrans.record import wording
from cdtrans.record.layout import CONFIG, ENVIRONMENT
from cdtrans.record.outcome import Measured, Outcome
from cdtrans.record.record import RunRecord
from cdtrans.record.run import RunWriter, require_resumable
from cdtrans.run.answers import Given, told_classes
from cdtrans.run.inputs import Inputs, RunPlan, decode_inputs, scan_domains
from cdtrans.run.stage1 import Origin, SourceModel, source_model
from cdtrans.runtime.ranks import from_main, joined, world
from cdtrans.runtime.screen import Screen, html_table
from cdtrans.runtime.signals import StopSignals, importing
from cdtrans.schema import Help, checked
from cdtrans.serving.classifier import Classifier, load

if TYPE_CHECKING:
    import torch

    from cdtrans.methods.base import Method, Sizes
    from cdtrans.network.network import Network
    from cdtrans.training.adaptation import Adaptation, TrainingData

# Where there is no SOURCE: with --source-model and --method shot.
TARGET_BY_FLAG = Help(
    "Folder with images at any depth, or a list of paths. Labels are not read.", "TARGET", also="--target"
)
STOP_NOTICE = "Stopping after the current step, to save the state; press Ctrl-C again to stop at once."


@dataclass(frozen=True)
class Result:
    """The result of `adapt`."""

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
        """The claim that labels refute, the guard's verdict and evidence, in a paragraph."""
        return wording.explanation(self.outcome, self.run, self._measured)

    @property
    def premise(self) -> str:
        """The condition of verdict and estimate: the classes that the target shows."""
        return wording.premise(self.outcome)

    @property
    def contradiction(self) -> str:
        """The accuracy that `eval` or `answer` has measured, if it refutes the estimate; otherwise empty."""
        return wording.refuted_claim(self.outcome, self._measured)

    @property
    def estimate(self) -> tuple[float, float] | None:
        """A range for the accuracy on the target; None if none can be given, or labels refute it."""
        found = self.outcome.estimate
        return None if found is None or self.contradiction else (found.low, found.high)

    @property
    def _measured(self) -> Measured | None:
        """The evidence of target labels, given since."""
        return RunRecord(self.run).measured

    @property
    def target_labels(self) -> int:
        """Target images that were trained with their labels (--answers)."""
        return self.outcome.target_labels

    def classifier(self) -> Classifier:
        return load(self.run)

    def summary(self) -> dict[str, Any]:
        """The promised keys of `adapt --json`."""
        names = ("chosen_epoch", "harm", "explanation", "contradiction", "estimate", "premise", "target_labels")
        class_set = asdict(self.outcome.class_set)
        return {"run": str(self.run)} | {name: getattr(self, name) for name in names} | {"class_set": class_set}

    def _repr_html_(self) -> str:
        found = self.estimate
        accuracy = f"{found[0]:.0%} to {found[1]:.0%}, {self.premise}" if found else "unknown"
        chosen = wording.chosen_model(self.outcome.choice)
        rows = [("run folder", str(self.run)), ("chosen", chosen), ("estimated accuracy", accuracy)]
        if self.target_labels:
            rows.append(("target labels trained with", str(self.target_labels)))
        return html_table("Adaptation did harm" if self.harm else "Adapted", (), rows, self.explanation)


@checked()
def adapt(
    source: SourceArgument | None = None,
    target: Annotated[TargetArgument | None, TARGET_BY_FLAG] = None,
    *,
    out: Annotated[
        str | Path | None, Help("The run folder (default: runs/adapt); an unfinished run there is resumed.")
    ] = None,
    config: SettingsFile = None,
    force: Force = False,
    quiet: bool = False,
    screen: Screen | None = None,
    **settings: Unpack[Settings],
) -> Result:
    """Adapt a classifier from labelled source images to unlabelled target images, into the run folder `out`.

    `settings` are the fields of `Config`; they override the YAML file `config`, which overrides the recipe and may also
    name `out`. A run folder with an unfinished run of the same settings is resumed. Data that makes a run pointless is
    refused, unless `force` is given."""
    chosen, named_out = compose_run(source, target, config, dict(settings))
    place = Path(out or named_out or "runs/adapt")
    return run_pipeline(chosen, place, screen or Screen(quiet=quiet), force=force)


def run_pipeline(
    config: Config, out: Path, screen: Screen, *, force: bool = False, method: "type[Method] | None" = None
) -> Result:
    """The whole run. `method` replaces the class that the configuration names, for ablations whose pairs are made with
    target labels."""
    plan = scan(config, out, screen, force=force, method=method)
    domains = () if RunRecord(out).finished else (plan.source, plan.target)
    with decoding_ahead(plan.config, *domains), importing():
        import timm  # noqa: F401 (slow, as is torch)

    with faults_named(plan.config.method), joined(plan.config.device):
        return Result(out, run_session(plan))


def scan(config: Config, out: Path, screen: Screen, *, force: bool, method: "type[Method] | None") -> RunPlan:
    """Find the images, and report all mistakes that show without torch."""
    started = time.monotonic()
    if method is None:
        require_method(config.method)
    classes: tuple[str, ...] = ()
    if not config.source:
        config, classes = Origin(out, config).without_source()
    source, target = scan_domains(config, screen, classes)
    require_outside(out, *(Path(place) for place in (config.source, config.target) if place))
    for finding, advice in warnings_for(source):
        screen.warn(f"{finding}. {advice}")
    config = replace(config, target_classes=told_classes(config, source.classes))
    Given.require(config, source.classes)
    require_resumable(out, config)
    if not RunRecord(out).finished:
        Origin(out, config).require()
    return RunPlan(config, source, target, out, screen, force, method, started)


def run_session(plan: RunPlan) -> Outcome:
    """From the scanned images to a finished run folder. Bad input is found before the folder is touched."""
    from cdtrans.run.finish import complete, finish, show_finished
    from cdtrans.training.loop import library, load_stage

    screen, kind = plan.screen, plan.method or method_class(plan.config.method)
    config = resolve(plan.config, kind)
    require_source(kind, config)
    if from_main(RunRecord(plan.out).finished):
        return show_finished(plan, config, kind)
    if config.tracker != "none":
        library(config.tracker)  # before the work, not after it
    origin = Origin(plan.out, config)
    network, card = origin.network(config, kind, plan.source.classes)
    open_screen(plan.out, config, screen, trains=kind.trains)
    inputs = decode_inputs(plan, config, kind)
    data = inputs.describe(config)
    origin.require_same_images(data.source)
    with RunWriter.open(plan.out, config, data) as run:
        if run.record.finished:  # by another process meanwhile
            return show_finished(plan, config, kind)
        with run.session(plan.started):
            # Between steps all files are whole. Of several ranks the main one must save before the others end.
            with StopSignals.caught("" if screen.quiet else STOP_NOTICE, at_once=world() == 1):
                device = use_device(config, screen)
                images = inputs.on_device(card, device)
                screen.steps = expected_steps(config, inputs, kind)
                inputs.record(run, fresh=load_stage(run) is None and not origin.done)
                if is_method_file(config.method):  # a mistake in its __init__ shows before stage 1 takes its time
                    make_method(kind, deepcopy(network), config, images.sizes(len(card.classes)))
                start = source_model(run, origin, network.to(device), card, images, config, screen)
                adaptation = adapt_narrowed(run, kind, start, images, config, screen)
            outcome = finish(run, adaptation, start.card, inputs, config, kind)
        complete(run.record, config, screen, run.timed("report"))
    return outcome


def adapt_narrowed(
    run: RunWriter, kind: "type[Method]", start: SourceModel, data: "TrainingData", config: Resolved, screen: Screen
) -> "Adaptation":
    """Stage 2 on the classes that occur in the target."""
    from cdtrans.pairing.narrowing import Numbering, narrowed
    from cdtrans.training.adaptation import adapt_to_target

    numbering = Numbering.of(start.evidence.occurs, data.labels)
    data, network = data.narrowed(numbering, start.frozen), narrowed(start.network, numbering.classes)
    method = make_method(kind, network, config, data.sizes(len(numbering.classes))).to(data.target.device)
    return adapt_to_target(run, method, data, start.evidence, numbering, config, screen, start.frozen)


def expected_steps(config: Resolved, inputs: Inputs, kind: "type[Method]") -> dict[str, int]:
    """Training steps of both stages, if every round pairs each image once."""
    images = max(len(inputs.source), len(inputs.target)) if kind.trains else 0
    return {"source": 0, "adaptation": config.epochs * (images // config.batch_size)}


def open_screen(out: Path, config: Resolved, screen: Screen, *, trains: bool) -> None:
    """Say what a run is about to do, in a few lines."""
    if RunRecord(out).begun:
        screen.say(f"Resuming the unfinished run in '{out}'; its settings are in {CONFIG.name} there.")
        warn_about_threads(out, config, screen)
        return
    recipe = f"recipe {config.recipe}" + (f", effort {config.effort}" if config.recipe == "best" else "")
    stage_1 = f"{counted(config.source_epochs, 'epoch')} on the source"
    if config.source_model:
        stage_1 = f"the source-only model of '{config.source_model}'"
    elif config.source_fit == "probe":
        stage_1 = "a probe on the source"
    epochs = counted(config.epochs, "epoch")
    stage_2 = f"{epochs} of {config.method}" if trains else f"the method {config.method}, no training"
    origin = "timm's weights" if config.pretrained else "from scratch"
    origin = f"weights of '{config.weights}'" if config.weights else origin
    screen.say(f"{recipe}: {stage_1}, then {stage_2}")
    screen.say(f"backbone {config.backbone} at {config.crop} pixels, {origin}")
    screen.say(f"on {config.device} in {config.precision}, seed {config.seed}")
    screen.say(f"all settings: {out / CONFIG.name}")


def warn_about_threads(out: Path, config: Resolved, screen: Screen) -> None:
    """On a CPU the number of threads decides how sums are rounded."""
    import torch

    record = RunRecord(out)
    if config.device != "cpu" or not record.has(ENVIRONMENT):  # killed at its very start
        return
    before, now = record.environment.threads, torch.get_num_threads()
    if before != now:
        screen.warn(
            f"The run began with {before} CPU threads and resumes with {now}, so its result will differ in the last "
            f"digits from that of an uninterrupted run; set OMP_NUM_THREADS={before} to avoid this."
        )


def resolve(config: Config, method: "type[Method] | None" = None) -> Resolved:
    """Replace every 'auto' by its value here and write out every option of the method. `method` replaces the class that
    the settings name. Settings that the method cannot work with are refused."""
    from cdtrans.network.backbone import native_crop, resolve_name
    from cdtrans.runtime.device import pick_device, pick_precision

    kind = method or method_class(config.method)
    options = check_options(kind.Options, config.method_args, config.method)
    if not kind.trains and config.epochs > 1:
        raise SettingsError(
            "no-epochs",
            f"The method '{config.method}' does not train, so --epochs {config.epochs} has no effect; use --epochs 1.",
        )
    if config.batch_size < kind.least_batch:
        raise SettingsError(
            "batch-too-small",
            f"The method '{config.method}' needs a --batch-size of {kind.least_batch} or more, not "
            f"{config.batch_size}.",
        )
    device, backbone = pick_device(config.device), resolve_name(config.backbone)
    crop = native_crop(backbone) if config.crop == "auto" else config.crop
    resize = resize_for(crop) if config.resize == "auto" else config.resize
    here = {"device": str(device), "backbone": backbone, "crop": crop, "resize": resize}
    here |= {"precision": pick_precision(config.precision, device), "method_args": asdict(options)}
    return Resolved(**make_config(config.to_dict() | here).to_dict())


def require_source(kind: "type[Method]", config: Config) -> None:
    """Refuse a run without source images of a method that needs them."""
    if kind.needs_source and not config.source:
        others = [name for name in METHODS if not method_class(name).needs_source]
        raise SettingsError(
            "no-source",
            f"The method '{config.method}' needs source images and none were given: name them, as in 'cdtrans adapt "
            f"SOURCE TARGET', or use --method {' or '.join(others)}.",
        )


def use_device(config: Resolved, screen: Screen) -> "torch.device":
    """The run's device, ready to train on."""
    import torch

    from cdtrans.network.operations import build_kernels

    device = torch.device(config.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # streams and graphs are made on the current one
        if config.precision != "fp32" and (cause := build_kernels(device)[1]):
            screen.warn(f"GPU kernels could not be built, so training takes twice as long ({cause}).")
    return device


def make_method(kind: "type[Method]", network: "Network", config: Config, sizes: "Sizes") -> "Method":
    """The run's seed initialises its modules. A model card must be able to describe the network that it serves."""
    import torch

    from cdtrans.network.network import AnyHead
    from cdtrans.training.loop import step_seed

    torch.manual_seed(step_seed(config.seed, "method", 0, 0))
    method = kind(network, check_options(kind.Options, config.method_args, config.method), sizes)
    served, own = method.served(), {id(parameter) for parameter in method.parameters()}
    if not isinstance(served.head, AnyHead) or any(id(p) not in own for p in served.parameters()):
        raise MethodError(
            "method-serves-other",
            f"{kind.__name__}.served() must return a Network made of the method's own modules, with a head of "
            "cdtrans.network.network; see docs/methods.md.",
        )
    return method
