"""The Hugging Face hub: download a model from it, upload a folder to it, and the folder's model card (README.md)."""

import re
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

from cdtrans.errors import DeviceError, SettingsError, counted, printable
from cdtrans.network import HUB_TIMEOUT
from cdtrans.record import wording
from cdtrans.record.model import FROM_SCRATCH, Card
from cdtrans.record.record import RunRecord
from cdtrans.runtime import package_version

REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
CODE = ("modeling_cdtrans.py", "tapped_vit.py")  # in a hub folder that timm cannot read; transformers runs them
MADE_BY = "made by unsupervised domain adaptation with cdtrans"  # every card says so
TEMPLATE = "hub_card.md"


def require_name(name: str) -> None:
    if not REPOSITORY.fullmatch(name) or "--" in name or ".." in name:
        raise SettingsError("hub-name", f"'{name}' is not the name of a repository on the hub; give USER/NAME.")


def download(name: str, files: Sequence[str]) -> Path:
    """A folder with those of the files that the repository has; they are downloaded once."""
    name, _, revision = name.partition("@")
    require_name(name)
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(name, revision=revision or None, allow_patterns=[*files], etag_timeout=HUB_TIMEOUT)
    except Exception as error:  # whatever the client raises without a network, a repository or a permission
        raise _refused(name, "downloaded", error) from error
    return Path(folder)


def upload(folder: Path, name: str, *, private: bool) -> str:
    """Make the repository unless it exists, and upload the folder; returns the address."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload a model by cdtrans")
    except Exception as error:  # as above
        raise _refused(name, "uploaded", error) from error
    return f"https://huggingface.co/{name}"


def _refused(name: str, done: str, error: Exception) -> DeviceError:
    """An error with advice by the answer of the hub; no answer at all means no network."""
    from huggingface_hub.errors import LocalTokenNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, RepositoryNotFoundError):
        cause = "there is no such repository, or it is private; check the name, or log in with 'hf auth login'"
    elif isinstance(error, RevisionNotFoundError):
        cause = "it has no such revision; check the part after @"
    elif isinstance(error, LocalTokenNotFoundError) or status in (401, 403):
        cause = "it is not permitted; log in with 'hf auth login' to an account that has access"
    elif status is not None:
        cause = f"it answered {status}; try again later"
    else:
        cause = f"there is no connection ({type(error).__name__}); connect to the network"
    return DeviceError("hub-refused", f"'{name}' could not be {done} (Hugging Face hub): {cause}.")


def hub_card(run: RunRecord, model: str, card: Card, *, folder: Path, name: str) -> str:
    """The model card: what the model was made of, how good it may be, how to load it. It names no path of this machine.
    `folder` has the files beside it; `name` is USER/NAME on the hub, or empty."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    from cdtrans.network.backbone import config_of, timm_call

    weights = "transformers" if (folder / CODE[0]).exists() else "timm"
    library = weights if (folder / "model.safetensors").exists() else "onnx"
    outcome, chosen = run.outcome, run.model_name(model)
    accuracy, known = wording.estimate(outcome, chosen), wording.accuracy(outcome, run.measured, run.folder)
    if known.kind == "measured" and chosen == outcome.choice.model:
        accuracy = f"{known.headline} It was {known.basis}."
    templates = Environment(
        loader=PackageLoader("cdtrans", "serving"),
        finalize=one_line,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters |= {"last": last, "counted": counted}
    return templates.get_template(TEMPLATE).render(
        architecture=timm_call(card.backbone, crop=card.crop, args=card.backbone_args)[0],
        calibrated=wording.CALIBRATED[run.calibrated_with(model)],
        card=card,
        config=run.config,
        data=run.data,
        from_scratch=card.weights == FROM_SCRATCH,
        licence=config_of(card.backbone).license if card.weights == card.backbone else None,
        library=library,
        made_by=MADE_BY,
        name=name,
        onnx=(folder / "model.onnx").exists(),
        quality=filter(None, [wording.evidence(outcome), accuracy, wording.trained_with_labels(outcome, chosen)]),
        version=package_version("cdtrans"),
    )


def last(path: str) -> str:
    """The last part of a path, on any system; other words are as they are."""
    return PurePath(path.replace("\\", "/")).name


def one_line(value: Any) -> Any:
    """Text as one line of Markdown that cannot end a table cell or begin HTML."""
    return printable(" ".join(str(value).split())).replace("|", "\\|").replace("<", "&lt;")
