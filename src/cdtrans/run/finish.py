"""The end of a run: the guard's verdict, the models, the chosen one's predictions, and what is printed."""

from dataclasses import replace
from typing import Any

import torch

from cdtrans.config import Config
from cdtrans.data.domains import UnlabelledDomain
from cdtrans.model.card import Card, save_model
from cdtrans.runtime.screen import Screen
from cdtrans.storage.files import csv_line
from cdtrans.storage.run import Run
from cdtrans.storage.run_folder import RESULT
from cdtrans.training.adaptation import Adaptation
from cdtrans.trust.estimate import estimate
from cdtrans.trust.guard import decide, labels_to_settle
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
    adapted = after is not None
    labels = labels_to_settle(before, after or before)
    verdict = decide(
        adaptation.measures, guard=config.guard, adapted=adapted, warning=adaptation.warning, labels=labels
    )
    epoch = 0 if verdict.verdict == "harm" or after is None else adaptation.chosen_epoch
    chosen = before if epoch == 0 or after is None else after
    write_predictions(run, target, card.classes, chosen.probabilities)
    support = {"source": before.support(before.predicted)}
    if after is not None:
        support["adapted"] = before.support(after.predicted)
    with run.timed("verdict"):
        run.write_arrays("views.npz", views(before, after or before))
        known = verdict.verdict == "better"
        estimated = estimate(support["adapted" if epoch else "source"], known=known, labels=labels).summary()
    card = replace(card, stage="adaptation", head=network.head.spec)
    if run.writes and after is not None:
        save_model(run.folder / "adapted", network, replace(card, epoch=adaptation.chosen_epoch))
    if run.writes and adaptation.last:
        network.load_state_dict(adaptation.last)
        save_model(run.folder / "last", network, replace(card, epoch=config.epochs))
    result = {
        "chosen_epoch": epoch,
        "chosen_model": "adapted" if epoch else "source",
        "judged_epoch": 0 if after is None else adaptation.chosen_epoch,  # compared with the source-only model
        "selection": config.select,
        "guard": verdict.summary(),
        "support": {name: found._asdict() for name, found in support.items()},
        "trained_with_key": trained_with_labels,
        "estimate": estimated,
    }
    run.write_json(RESULT, result)
    return result


def show(result: dict[str, Any], screen: Screen) -> None:
    """The guard's paragraph, if it has something to say, and the estimate."""
    guard, estimated = result.get("guard", {}), result.get("estimate", {})  # runs of the first version have neither
    if guard.get("findings") or guard.get("warning"):
        screen.warn(guard["paragraph"])
    if estimated:
        screen.say(estimated["sentence"])


def write_predictions(
    run: Run, target: UnlabelledDomain, classes: tuple[str, ...], probabilities: torch.Tensor
) -> None:
    """predictions.csv: what the chosen model says of every target image."""
    probability, predicted = probabilities.max(dim=1)
    predictions = zip(target.paths, predicted.tolist(), probability.tolist(), strict=True)
    rows = sorted((path, classes[k], f"{p:.6f}") for path, k, p in predictions)
    run.write("predictions.csv", b"".join(map(csv_line, [("path", "label", "probability"), *rows])))
