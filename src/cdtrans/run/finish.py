"""The end of a run: judge both models, then save them, the predictions of the chosen one and the outcome."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from cdtrans.config import Config
from cdtrans.inputs.scan import UnlabelledDomain
from cdtrans.methods.base import Method
from cdtrans.record import wording
from cdtrans.record.layout import ADAPTED, LAST, LOGITS, PREDICTIONS, SOURCE, VIEWS
from cdtrans.record.model import Card, save_model
from cdtrans.record.outcome import Basis, Choice, Estimate, ModelName, Outcome, Verdict
from cdtrans.record.probabilities import calibrated, temperature, trade_off
from cdtrans.record.record import RunRecord
from cdtrans.record.run import Run, confidence_views, predictions_csv
from cdtrans.runtime.screen import Screen
from cdtrans.training.adaptation import Adaptation
from cdtrans.trust.estimate import estimate, expected_accuracy, measurable
from cdtrans.trust.guard import crowded_start, decide, labels_to_settle, supported
from cdtrans.trust.support import Impression, views


def judge(adaptation: Adaptation, config: Config, kind: type[Method], classes: tuple[str, ...], given: int) -> Outcome:
    """Verdict, estimates and choice. `given`: images that --target-labels trained."""
    before, after = adaptation.before, adaptation.after
    verdict, basis = decide(adaptation.measures, adapted=after is not None), basis_of(adaptation)
    kept = verdict.kind != "harm" or not config.guard
    outcome = Outcome(
        verdict=verdict,
        guard=config.guard,
        choice=Choice("source", 0),
        adapted_epoch=0 if after is None else adaptation.chosen_epoch,
        estimates=estimates(adaptation, verdict, basis, trains=kind.trains),
        labels=labels_to_settle(before, after or before),
        selection=config.select,
        setback=adaptation.setback if kept else None,
        crowd=crowded_start(before, classes),
        basis=basis,
        target_labels=given,
        trained_with_labels=kind.uses_target_labels,
    )
    return outcome.choose(outcome.own_choice)


def models_of(adaptation: Adaptation) -> dict[ModelName, Impression]:
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
        support={name: evidence.support(labels) for name, labels in predicted.items()},
        stayed={name: evidence.stayed(labels, before.predicted) for name, labels in predicted.items()},
    )


def estimates(
    adaptation: Adaptation, verdict: Verdict, basis: Basis | None, *, trains: bool
) -> dict[ModelName, Estimate | None]:
    """A range for each model, where there can be one. Its own features flatter a source-only model, and the graphs'
    labels a method that serves them as they are."""
    models = models_of(adaptation)
    evidence, images = adaptation.evidence, len(adaptation.before.predicted)
    if basis is None or not measurable(evidence.source_labels, images):
        return dict.fromkeys(models)
    known = {
        SOURCE: verdict.kind != "harm" and evidence.pretrained,
        ADAPTED: verdict.kind == "better" and (evidence.pretrained or trains),
    }
    return {
        name: estimate(support, basis.stayed[name], evidence) if known[name] and supported(support) else None
        for name, support in basis.support.items()
    }


def fitted_temperature(adaptation: Adaptation, basis: Basis | None) -> float:
    """The adapted model's temperature. The source-only model keeps its own, which does not depend on a target."""
    if basis is None or adaptation.after is None:
        return 1.0
    expected = expected_accuracy(basis.support[ADAPTED], basis.stayed[ADAPTED], adaptation.evidence)
    return temperature(adaptation.after.target_logits.numpy(), expected)


def save(
    run: Run, adaptation: Adaptation, outcome: Outcome, card: Card, target: UnlabelledDomain, config: Config
) -> None:
    """The models, the predictions of the chosen one and, last, the outcome."""
    network, before, after = adaptation.network, adaptation.before, adaptation.after
    hot = fitted_temperature(adaptation, outcome.basis)
    logits: dict[str, np.ndarray] = {n: model.target_logits.numpy() for n, model in models_of(adaptation).items()}
    scaled = {name: calibrated(x, hot if name == ADAPTED else 1.0) for name, x in logits.items()}
    run.write_arrays(LOGITS.name, logits)
    sure = confidence_views(scaled[SOURCE], scaled.get(ADAPTED, scaled[SOURCE]))
    run.write_arrays(VIEWS.name, views(before, after or before) | sure)
    table = predictions_csv(target.paths, card.classes, scaled[outcome.choice.model], scaled[SOURCE])
    run.write(PREDICTIONS.name, table)
    card = replace(
        card,
        stage="adaptation",
        head=network.head.spec,
        transferability=network.transferability is not None,
        target_labels=outcome.target_labels,
        temperature=hot,
    )
    if run.writes and after is not None:
        save_model(run.folder / ADAPTED, network, replace(card, epoch=adaptation.chosen_epoch))
    if run.writes and adaptation.last:
        network.load_state_dict(adaptation.last)
        save_model(run.folder / LAST, network, replace(card, epoch=config.epochs))
    run.write_result(outcome)


def show(run: Path, outcome: Outcome, screen: Screen) -> None:
    """Print the verdict, the estimate, and the accuracy to expect of fewer labels."""
    alarming = outcome.verdict.findings or outcome.setback or outcome.crowd
    (screen.warn if alarming else screen.say)(wording.explanation(outcome, run))
    screen.say(wording.estimate(outcome))
    if outcome.estimate is not None:
        screen.say(wording.trade_off(trade_off(RunRecord(run).confidences())))
