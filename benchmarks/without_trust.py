"""`cdtrans` without what trust adds: no check of the data, no scores, no choice. For trust_cost.py alone, which gives
`--no-report --no-guard --select last` besides."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cdtrans.cli import app as entry
from cdtrans.run import pipeline
from cdtrans.runtime.signals import importing as importing_all

NEUTRAL = dict.fromkeys(("information", "nuclear_norm", "clusters", "centers", "consensus"), 1.0)


@contextmanager
def importing() -> Iterator[None]:
    """As in a run with trust, so that both start alike; then some parts are taken out."""
    with importing_all():
        yield
    from cdtrans.run import inputs, stage1
    from cdtrans.trust import selection

    def only_predictions(self: Any, epoch: int, target: Any, encode: Any = None) -> None:
        selection.save_predictions(self.run, epoch, target, self.numbering)
        self.scores[epoch] = NEUTRAL
        if epoch > 0:
            self.best = selection.BestEpoch(epoch, 0.0, self.encode.model.state_dict())

    vars(inputs)["check_data"] = lambda *_, **__: ()
    vars(stage1)["pretrained_evidence"] = lambda *_, **__: None
    selection.Watch.epoch = only_predictions  # type: ignore[method-assign]


if __name__ == "__main__":
    vars(pipeline)["importing"] = importing
    entry.run_program()
