"""What a run says before it begins."""

from pathlib import Path

import pytest

from cdtrans.config import make_config
from cdtrans.run.session import opening


@pytest.mark.parametrize(
    ("settings", "trains", "plan"),
    [
        ({"epochs": 1}, True, "then 1 epoch of cdtrans"),
        ({"epochs": 4}, True, "then 4 epochs of cdtrans"),
        ({"method": "instant", "epochs": 1}, False, "then the method instant, no training"),
    ],
)
def test_epochs_are_named_where_there_are_any(settings: dict[str, object], trains: bool, plan: str) -> None:
    assert opening(make_config(settings), Path("run"), trains=trains)[0].endswith(plan)
