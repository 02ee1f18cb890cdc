"""The end of a run: judge both models, save them, the predictions of the chosen one and the outcome, and show it."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from cdtrans.config import Config, Resolved
from cdtrans.methods.base import Method
from cdtrans.record import wording
from cdtrans.record.layout import ADAPTED, LAST, LOGITS, PREDICTIONS, REPORT, RESULT, SOURCE, VIEWS
from cdtrans.record.model import Card, save_model
from cdtrans.record.outcome import Basis, Choice, ClassSet, Crowd, Interval, Outcome, Verdict
from cdtrans.record.probabilities import calibrated, temperature
from cdtrans.record.record import RunRecord
from cdtrans.record.run import RunWriter, confidence_views, predictions_csv, remove_state, require_resumable
from cdtrans.reporting.page import write_report
from cdtrans.run.answers import Given
from cdtrans.run.inputs import Inputs, RunPlan
from cdtrans.runtime.ranks import barrier, is_main
from cdtrans.runtime.screen import Screen
from cdtrans.training.adaptation import Adaptation
from cdtrans.trust.estimate import accuracy_range, expected_accuracy, measurable
from cdtrans.trust.guard import decide, labels_to_settle, supported
from cdtrans.trust.support import Impression, views


def finish(
    run: RunWriter, adaptation: Adaptation, card: Card, inputs: Inputs, config: Resolved, kind: type[Method]
) -> Outcome:
    """Judge both models, and save them, the predictions of the chosen one and, last, the outcome."""
    with run.timed("verdict"):
        network, before, after = adaptation.network, adaptation.before, adaptation.after
        numbering = adaptation.numbering
        occurring = tuple(card.classes[k] for k in numbering.classes)
        outcome = judge(adaptation, config, kind, card.classes, occurring, inputs.given)
        hot = fitted_temperature(adaptation, outcome.basis)
        logits = {n: numbering.logits(model.target_logits.numpy()) for n, model in models_of(adaptation).items()}
        scaled = {name: calibrated(x, hot if name == ADAPTED else 1.0) for name, x in logits.items()}
        run.write(LOGITS, logits)
        sure = confidence_views(scaled[SOURCE], scaled.get(ADAPTED, scaled[SOURCE]))
        seen = views(before, after or before, adaptation.evidence, numbering)
        run.write(VIEWS, seen | sure)
        paths, labels, curve = inputs.target.domain.paths, scaled[outcome.choice.model], outcome.class_set.curve
        run.write(PREDICTIONS, predictions_csv(paths, card.classes, labels, seen["no_class"], curve))
        card = replace(
            card,
            classes=occurring,
            stage="adaptation",
            head=network.head.spec,
            transferability=network.transferability is not None,
            target_labels=outcome.target_labels,
            temperature=hot,
        )
        if run.writes and after is not None:
            save_model(run.record.model_folder(ADAPTED), network, replace(card, epoch=adaptation.chosen_epoch))
        if run.writes and adaptation.last:
            network.load_state_dict(adaptation.last)
            save_model(run.record.model_folder(LAST), network, replace(card, epoch=config.epochs))
        run.write(RESULT, outcome)
    return outcome


def complete(
    record: RunRecord, config: Resolved, screen: Screen, timed: AbstractContextManager[None] = nullcontext()
) -> None:
    """Write the report if there is none, show the outcome, and drop what only an unfinished run needs."""
    if is_main():  # another rank may be here before the main rank has written what is shown
        if config.report and not record.has(REPORT):
            with timed:
                screen.begin("report")
                screen.say(f"report: {write_report(record, screen)}")
        show(record, record.outcome, screen)
        remove_state(record.folder)
    barrier()  # the others read the outcome that the main rank has written


def show_finished(plan: RunPlan, config: Resolved, kind: type[Method]) -> Outcome:
    """Show a run that is finished already, and say whether its images or labels have changed since."""
    out, screen = plan.out, plan.screen
    require_resumable(out, config)
    record = RunRecord(out)
    screen.say(f"The run in '{out}' is already finished.")
    Given.warn_of_changes(record, config, kind, plan.target, screen)
    before = {"source": record.data.source.scanned, "target": record.data.target.scanned}
    if changed := [name for name, now in plan.scanned.items() if before[name] != now]:
        screen.warn(
            f"The {' and '.join(changed)} images have changed since the run in '{out}' began, but its result is "
            "for the earlier ones; choose another --out to adapt to them, or label new images with 'cdtrans predict'."
        )
    complete(record, config, screen)  # if the run was killed at the very end, before its report was written
    return record.outcome


def judge(
    adaptation: Adaptation,
    config: Config,
    kind: type[Method],
    classes: tuple[str, ...],
    occurring: tuple[str, ...],
    given: Given,
) -> Outcome:
    """Verdict, estimates and choice, for the source's classes and those of them that occur."""
    before, after = adaptation.before, adaptation.after
    verdict, basis = decide(adaptation.measures, adapted=after is not None), basis_of(adaptation)
    predicted, source = (
        x.bincount(minlength=len(occurring)).tolist() for x in (before.predicted, before.source_labels)
    )
    kept = verdict.kind != "harm" or not config.guard
    known = class_set(adaptation, classes, occurring, given)
    outcome = Outcome(
        verdict=verdict,
        guard=config.guard,
        choice=Choice("source", 0),
        adapted_epoch=0 if after is None else adaptation.chosen_epoch,
        estimates=estimates(adaptation, verdict, basis, known, trains=kind.trains),
        labels=labels_to_settle(before, after or before),
        selection=config.select,
        setback=adaptation.setback if kept else None,
        crowd=Crowd.of(predicted, source, occurring),
        basis=basis,
        class_set=known,
        target_labels=len(given),
        trained_with_labels=kind.uses_target_labels,
    )
    return outcome.choose(outcome.own_choice)


def class_set(adaptation: Adaptation, classes: tuple[str, ...], occurring: tuple[str, ...], given: Given) -> ClassSet:
    """How the run came to its classes, and the curve through the user's answers about images."""
    evidence = adaptation.evidence
    absent = tuple(name for name in classes if name not in occurring)
    by = given.class_source or ("noticed" if evidence.noticed else "assumed")
    return ClassSet(absent, by, given.others, given.curve(evidence.no_class.numpy()), len(classes))


def models_of(adaptation: Adaptation) -> dict[str, Impression]:
    if adaptation.after is None:
        return {SOURCE: adaptation.before}
    return {SOURCE: adaptation.before, ADAPTED: adaptation.after}


def basis_of(adaptation: Adaptation) -> Basis | None:
    evidence, before = adaptation.evidence, adaptation.before
    if not before.has_source:
        return None
    predicted = {name: model.predicted for name, model in models_of(adaptation).items()}
    return Basis(
        features="pretrained" if evidence.pretrained else "source-only",
        agreement=float(evidence.agreement),
        steady=float(evidence.steady),
        strange=float(evidence.strange),
        support={name: evidence.support(labels) for name, labels in predicted.items()},
        stayed={name: evidence.stayed(labels, before.predicted) for name, labels in predicted.items()},
    )


def estimates(
    adaptation: Adaptation, verdict: Verdict, basis: Basis | None, known: ClassSet, *, trains: bool
) -> dict[str, Interval | None]:
    """A range for each model, where there can be one. Its own features flatter a
    source-only model, and the graphs' labels a method that serves them as they are."""
    models = models_of(adaptation)
    evidence, images = adaptation.evidence, len(adaptation.before.predicted)
    if basis is None or known.question(basis) or not measurable(evidence.source_labels, images):
        return dict.fromkeys(models)
    follows = trains and adaptation.after is not None and evidence.agrees(adaptation.after.predicted)
    allowed = {
        SOURCE: verdict.kind != "harm" and evidence.pretrained,
        ADAPTED: verdict.kind == "better" and (evidence.pretrained or follows),
    }
    return {
        name: accuracy_range(support, basis.stayed[name], evidence) if allowed[name] and supported(support) else None
        for name, support in basis.support.items()
    }


def fitted_temperature(adaptation: Adaptation, basis: Basis | None) -> float:
    """The adapted model's temperature. The source-only model keeps its own, which does not depend on a target."""
    if basis is None or adaptation.after is None:
        return 1.0
    expected = expected_accuracy(basis.support[ADAPTED], basis.stayed[ADAPTED], adaptation.evidence)
    return temperature(adaptation.after.target_logits.numpy(), expected)


def show(record: RunRecord, outcome: Outcome, screen: Screen) -> None:
    """Print the verdict, the estimate, and the accuracy to expect of fewer labels."""
    measured = record.measured
    refuted, noticed = outcome.contradicted_by(measured), outcome.class_set.by == "noticed"
    alarming = refuted or noticed or outcome.verdict.findings or outcome.setback or outcome.crowd
    (screen.warn if alarming else screen.say)(wording.explanation(outcome, record.folder, measured))
    if not refuted:
        screen.say(wording.estimate(outcome))
    if outcome.estimate is not None and not refuted:
        screen.say(wording.kept_accuracy(record.accuracy_by_share(), outcome))
