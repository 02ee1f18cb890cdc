import math
from typing import Any

import pytest

from cdtrans.record.shapes import Misfit, require

SHAPE = {"name": str, "size": range(1, 9), "kind": {"a", "b"}, "low": (float, None), "all": [int], "in": {"x": bool}}
GOOD = {"name": "n", "size": 8, "kind": "a", "low": None, "all": [1, 2], "in": {"x": True, "y": 5}, "more": 1}


def test_what_fits() -> None:
    require(GOOD, SHAPE, needs=("name", "more"))
    require({}, SHAPE)
    require({"low": 1, "all": []}, SHAPE)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        *(({"name": 5}, "name is 5"), ({"size": 9}, "size is 9"), ({"size": "8"}, "size is '8'")),
        *(({"size": True}, "size is True"), ({"size": 8.0}, "size is 8.0"), ({"kind": ["a"]}, "kind is ['a']")),
        *(({"low": math.nan}, "low is nan"), ({"low": 10**400}, "low is 1000"), ({"all": [1, None]}, "all is None")),
        *(({"all": {}}, "all is {}"), ({"in": []}, "in is []"), ({"in": {"x": 1}}, "in.x is 1")),
    ],
)
def test_the_part_that_does_not_fit_is_named(change: dict[str, Any], told: str) -> None:
    with pytest.raises(Misfit) as caught:
        require(GOOD | change, SHAPE)
    assert str(caught.value).startswith(told)


def test_what_is_missing_is_named() -> None:
    with pytest.raises(Misfit, match="'other' is missing"):
        require(GOOD, SHAPE, needs=("name", "other"))
    with pytest.raises(Misfit, match="it is 5"):
        require(5, SHAPE)
