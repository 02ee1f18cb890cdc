"""The end of a run: the guard's verdict, the models, the chosen one's predictions, and what is printed."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from cdtrans.config import Config
from cdtrans.data.domains import UnlabelledDomain
from cdtrans.errors import CdtransError
from cdtrans.model.card import Card, save_model
from cdtrans.runtime.screen import Screen
from cdtrans.serving.recorded import LOGITS, PREDICTIONS, VIEWS, confidence_views, confidences, predictions_csv
from cdtrans.serving.trade_off import in_a_line, trade_off
from cdtrans.storage.card_file import set_temperature
from cdtrans.storage.run import Run
from cdtrans.storage.run_folder import RESULT
from cdtrans.training.adaptation import Adaptation
from cdtrans.trust.estimate import estimate
from cdtrans.trust.guard import decide
from cdtrans.trust.impression import views


class Temperatures(NamedTuple):
    """That calibrate the probabilities of the two models; 1 leaves them as they are."""

    source: float = 1.0
    adapted: float = 1.0


def finish(
    run: Run,
    card: Card,
    target: UnlabelledDomain,
    adaptation: Adaptation,
    config: Config,
    *,
    trained_with_labels: bool,
    temperatures: Temperatures = Temperatures(),
) -> dict[str, Any]:
    """The guard's verdict, the models with their temperatures, the predictions of the chosen one, and last of all
    result.json, which is returned."""
    network, before, after = adaptation.network, adaptation.before, adaptation.after
    adapted = after is not None
    verdict = decide(adaptation.measures, guard=config.guard, adapted=adapted, warning=adaptation.warning)
    epoch = 0 if verdict.verdict == "harm" or after is None else adaptation.chosen_epoch
    chosen = before if epoch == 0 or after is None else after
    logits = {"source": before.target_logits.numpy()}
    if after is not None:
        logits["adapted"] = after.target_logits.numpy()
    run.write_arrays(LOGITS, logits)
    calibrated = {name: x / getattr(temperatures, name) for name, x in logits.items()}
    of_chosen = calibrated["adapted" if epoch else "source"]
    run.write(PREDICTIONS, predictions_csv(target.paths, card.classes, of_chosen, calibrated["source"]))
    with run.timed("verdict"):
        sure = confidence_views(calibrated["source"], calibrated.get("adapted", calibrated["source"]))
        run.write_arrays(VIEWS, views(before, after or before) | sure)
        harm = any(measure.decisive for measure in verdict.objections)
        estimated = estimate(before, chosen.predicted, harm=harm).summary()
    if run.writes:
        set_temperature(run.folder / "source", temperatures.source)
    card = replace(card, stage="adaptation", head=network.head.spec, temperature=temperatures.adapted)
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
        "trained_with_key": trained_with_labels,
        "estimate": estimated,
    }
    run.write_json(RESULT, result)
    return result


def show(run: Path, result: dict[str, Any], screen: Screen) -> None:
    """The guard's paragraph, if it has something to say, the estimate, and what fewer labels would gain."""
    guard, estimated = result.get("guard", {}), result.get("estimate", {})  # runs of the first version have neither
    if guard.get("findings") or guard.get("warning"):
        screen.warn(guard["paragraph"])
    if estimated:
        screen.say(estimated["sentence"])
    if estimated and not estimated.get("harm"):
        with suppress(CdtransError):  # a run of an earlier version has recorded no logits
            screen.say(in_a_line(trade_off(confidences(run))))
