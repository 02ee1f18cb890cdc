"""The end of a run: the guard's verdict, the models, the chosen one's predictions, and what is printed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cdtrans.config import Config
from cdtrans.data.domains import UnlabelledDomain
from cdtrans.model.card import Card, save_model
from cdtrans.run.choose import explanation
from cdtrans.runtime.screen import Screen
from cdtrans.storage.files import csv_line
from cdtrans.storage.run import Run
from cdtrans.storage.run_folder import PREDICTIONS, RESULT, model_predictions
from cdtrans.training.adaptation import Adaptation
from cdtrans.trust.estimate import estimate
from cdtrans.trust.guard import decide, labels_to_settle, supported
from cdtrans.trust.impression import views


def finish(
    run: Run,
    card: Card,
    target: UnlabelledDomain,
    adaptation: Adaptation,
    config: Config,
    *,
    trained_with_labels: bool,
) -> dict[str, Any]:
    """The guard's verdict, the models, the predictions of the chosen one, and last of all result.json, which is
    returned."""
    network, before, after = adaptation.network, adaptation.before, adaptation.after
    models = {"source": before} if after is None else {"source": before, "adapted": after}
    labels = labels_to_settle(before, after or before)
    verdict = decide(
        adaptation.measures, guard=config.guard, adapted=after is not None, warning=adaptation.warning, labels=labels
    )
    chosen = "source" if verdict.verdict == "harm" or after is None else "adapted"
    for name, seen in models.items():
        content = prediction_lines(target, card.classes, seen.probabilities)
        run.write(model_predictions(name), content)
        if name == chosen:
            run.write(PREDICTIONS, content)
    with run.timed("verdict"):
        run.write_arrays("views.npz", views(before, after or before))
        support = {name: before.support(seen.predicted) for name, seen in models.items()}
        estimates = {
            name: estimate(found, known=verdict.verdict in ("better", "unknown") and supported(found), labels=labels)
            for name, found in support.items()
        }
    card = replace(card, stage="adaptation", head=network.head.spec)
    if run.writes and after is not None:
        save_model(run.folder / "adapted", network, replace(card, epoch=adaptation.chosen_epoch))
    if run.writes and adaptation.last:
        network.load_state_dict(adaptation.last)
        save_model(run.folder / "last", network, replace(card, epoch=config.epochs))
    result = {
        "chosen_epoch": adaptation.chosen_epoch if chosen == "adapted" else 0,
        "chosen_model": chosen,
        "chosen_by": "run",  # or "person", after `cdtrans choose`
        "judged_epoch": 0 if after is None else adaptation.chosen_epoch,  # compared with the source-only model
        "selection": config.select,
        "guard": verdict.summary(),
        "support": {name: found._asdict() for name, found in support.items()},
        "trained_with_key": trained_with_labels,
        "estimate": estimates[chosen].summary(),
        "estimates": {name: found.summary() for name, found in estimates.items()},  # of all that could be chosen
    }
    run.write_json(RESULT, result)
    return result


def show(run: Path, result: dict[str, Any], screen: Screen) -> None:
    """The guard's paragraph, if it has something to say, and the estimate."""
    guard, estimated = result.get("guard", {}), result.get("estimate", {})  # runs of the first version have neither
    if guard.get("findings") or guard.get("warning"):
        screen.warn(explanation(run, result))
    if estimated:
        screen.say(estimated["sentence"])


def prediction_lines(target: UnlabelledDomain, classes: tuple[str, ...], probabilities: torch.Tensor) -> bytes:
    """A CSV: what a model says of every target image."""
    probability, predicted = probabilities.max(dim=1)
    predictions = zip(target.paths, predicted.tolist(), probability.tolist(), strict=True)
    rows = sorted((path, classes[k], f"{p:.6f}") for path, k, p in predictions)
    return b"".join(map(csv_line, [("path", "label", "probability"), *rows]))
