"""The page on which images are labelled: one self-contained HTML file."""

import hashlib
from typing import Any

from cdtrans.measure.labels import NO_CLASS, UNSURE
from cdtrans.measure.target import FinishedTarget
from cdtrans.reporting.templates import templates


def render(target: FinishedTarget, images: list[dict[str, str]]) -> str:
    """`images`: path, digest, part and picture, a data URL, of each. The page shows neither predictions nor parts."""
    asked = "".join(image["digest"] for image in images)
    data: dict[str, Any] = {
        "key": hashlib.sha256(f"{target.fingerprint}{asked}".encode()).hexdigest()[:16],  # for the answers so far
        "classes": target.classes,
        "others": [UNSURE, NO_CLASS],
        "images": images,
    }
    return templates("measure").get_template("page.html").render(data=data, run=str(target.run), count=len(images))
