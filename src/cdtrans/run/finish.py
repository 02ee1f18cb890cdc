"""The end of a run: the guard's verdict, the models, the chosen one's predictions, and what is printed."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from cdtrans.config import Config
from cdtrans.errors import CdtransError
from cdtrans.inputs.domains import UnlabelledDomain
from cdtrans.methods.base import Method
from cdtrans.network.card import Card, save_model
from cdtrans.record.run import Run
from cdtrans.record.run_folder import PREDICTIONS, RESULT
from cdtrans.run.choose import explanation
from cdtrans.runtime.screen import Screen
from cdtrans.serving.probabilities import calibrated, temperature
from cdtrans.serving.recorded import LOGITS, VIEWS, confidence_views, confidences, predictions_csv
from cdtrans.serving.trade_off import in_a_line, trade_off
from cdtrans.training.adaptation import Adaptation
from cdtrans.trust.estimate import estimate, measurable, unknown
from cdtrans.trust.guard import crowded_start, decide, labels_to_settle, supported
from cdtrans.trust.support import views


def finish(
    run: Run,
    card: Card,
    target: UnlabelledDomain,
    adaptation: Adaptation,
    config: Config,
    kind: type[Method],
    target_labels: int,
) -> dict[str, Any]:
    """Judge, then save the models, the predictions of the chosen one and, last, result.json, which is returned. The
    source-only model keeps its temperature, which does not depend on a target."""
    network, before, after = adaptation.network, adaptation.before, adaptation.after
    models = {"source": before} if after is None else {"source": before, "adapted": after}
    labels = labels_to_settle(before, after or before)
    verdict = decide(
        adaptation.measures, guard=config.guard, adapted=after is not None, warning=adaptation.warning, labels=labels
    )._replace(start=crowded_start(before, card.classes))
    chosen = "source" if verdict.verdict == "harm" or after is None else "adapted"
    evidence = adaptation.evidence
    with run.timed("verdict"):
        support = {n: evidence.support(m.predicted) for n, m in models.items() if before.has_source}
        stayed = {name: evidence.stayed(models[name].predicted, before.predicted) for name in support}
        reference = {"agreement": float(evidence.agreement), "steady": float(evidence.steady), "stayed": stayed}
        judged = {"source": verdict.verdict in ("better", "unknown"), "adapted": verdict.verdict == "better"}
        # its own features flatter a source-only model, and the graphs' labels a method that serves them as they are
        judged["source"] &= evidence.pretrained
        judged["adapted"] &= evidence.pretrained or kind.trains
        enough = before.has_source and measurable(evidence.source_labels, len(target))
        estimates = dict.fromkeys(models, unknown(labels)) | {
            name: estimate(x, stayed[name], evidence, known=enough and judged[name] and supported(x), labels=labels)
            for name, x in support.items()
        }
        logits = {name: seen.target_logits.numpy() for name, seen in models.items()}
        hot = temperature(logits["adapted"], estimates["adapted"].accuracy) if "adapted" in support else 1.0
        scaled = {name: calibrated(x, hot if name == "adapted" else 1.0) for name, x in logits.items()}
        sure = confidence_views(scaled["source"], scaled.get("adapted", scaled["source"]))
        run.write_arrays(LOGITS, logits)
        run.write_arrays(VIEWS, views(before, after or before) | sure)
    run.write(PREDICTIONS, predictions_csv(target.paths, card.classes, scaled[chosen], scaled["source"]))
    card = replace(
        card, stage="adaptation", head=network.head.spec, transferability=network.transferability is not None
    )
    card = replace(card, target_labels=target_labels, temperature=hot)
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
        "evidence_features": evidence.features if before.has_source else None,
        "support": {name: found._asdict() for name, found in support.items()},
        "reference": reference if support else None,
        "trained_with_key": kind.uses_target_labels,
        "target_labels": target_labels,  # images that the user's --target-labels trained
        "estimate": estimates[chosen].summary(),
        "estimates": {name: found.summary() for name, found in estimates.items()},  # of all that could be chosen
    }
    run.write_json(RESULT, result)
    return result


def show(run: Path, result: dict[str, Any], screen: Screen) -> None:
    """Print the guard's verdict, the estimate, and the accuracy to expect of fewer labels."""
    guard, estimated = result.get("guard", {}), result.get("estimate", {})  # runs of the first version have neither
    tell = screen.warn if guard.get("findings") or guard.get("warning") or guard.get("start") else screen.say
    if verdict := explanation(run, result):
        tell(verdict)
    if estimated:
        screen.say(estimated["sentence"])
    if estimated and estimated["low"] is not None and not estimated.get("harm"):
        with suppress(CdtransError):  # a run of an earlier version has recorded no logits
            screen.say(in_a_line(trade_off(confidences(run))))
