"""The Hugging Face hub: download a model from it, upload a folder to it, and the folder's model card (README.md)."""

import json
import re
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from cdtrans.config import read_yaml
from cdtrans.errors import DeviceError, SettingsError, counted, ended, printable
from cdtrans.record.files import intact
from cdtrans.record.run_folder import AGAIN, CONFIG, find_model, read_result
from cdtrans.runtime.environment import package_version
from cdtrans.serving.recorded import calibrated_with

if TYPE_CHECKING:
    from cdtrans.record.model import Card

HUB_SECONDS = 10.0  # a hub that has not answered by then is out of reach
NAME = re.compile(r"[\w.-]+/[\w.-]+")
CODE = ("modeling_cdtrans.py", "tapped_vit.py")  # in a hub folder that timm cannot read; transformers runs them
MADE_BY = "made by unsupervised domain adaptation with cdtrans"  # every card says so
CALIBRATED = {
    "estimate": "With it, the probabilities are calibrated to that estimate.",
    "labels": "With it, the probabilities are calibrated with the labels of some target images.",
    "nothing": "The probabilities are not calibrated on the target: fewer of the labels may be right than they say.",
}
LISTED = 100  # classes in the table; config.json names all


def require_name(name: str) -> None:
    if not NAME.fullmatch(name) or "--" in name or ".." in name:
        raise SettingsError(
            "hub-name", f"'{name}' is not the name of a repository on the Hugging Face hub; give USER/NAME."
        )


def download(name: str, files: Sequence[str]) -> Path:
    """A folder with those of the files that the repository has; they are downloaded once."""
    name, _, revision = name.partition("@")
    require_name(name)
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            name, revision=revision or None, allow_patterns=list(files), etag_timeout=HUB_SECONDS
        )
    except Exception as error:  # whatever the client raises without a network, a repository or a permission
        raise DeviceError(
            "hub-refused", f"'{name}' could not be downloaded from the Hugging Face hub: {_cause(error)}."
        ) from error
    return Path(folder)


def upload(folder: Path, name: str, *, private: bool) -> str:
    """Make the repository unless it exists, and upload the folder; returns the address."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload a model by cdtrans")
    except Exception as error:  # as above
        raise DeviceError(
            "hub-refused", f"'{name}' could not be uploaded to the Hugging Face hub: {_cause(error)}."
        ) from error
    return f"https://huggingface.co/{name}"


def _cause(error: Exception) -> str:
    """What to do, by the answer of the hub; no answer at all means no network."""
    from huggingface_hub.errors import LocalTokenNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, RepositoryNotFoundError):
        return "there is no such repository, or it is private; check the name, or log in with 'hf auth login'"
    if isinstance(error, RevisionNotFoundError):
        return "it has no such revision; check the part after @"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, LocalTokenNotFoundError) or status in (401, 403):
        return "it is not permitted; log in with 'hf auth login' to an account that has access"
    if status is not None:
        return f"it answered {status}; try again later"
    return f"there is no connection ({type(error).__name__}); connect to the network"


def hub_card(
    run: Path, card: "Card", model: str, *, architecture: str, licence: str | None, files: list[str], name: str | None
) -> str:
    """`files` are those of the folder beside it; `name` is USER/NAME on the hub, None for a folder."""
    result, settings, data = read_result(run), read_yaml(run / CONFIG), _data(run)
    source, target = data.get("source") or {}, data.get("target") or {}
    chosen, with_key = find_model(run, model)
    estimates = result.get("estimates", {result["chosen_model"]: result.get("estimate", {})})
    estimate = estimates.get(chosen, {}).get("sentence", "The accuracy of this model on the target was not estimated.")
    labels = (
        f"It was trained with the labels of {counted(card.target_labels, 'target image')}."
        if card.target_labels
        else ""
    )
    library = "transformers" if CODE[0] in files else "timm" if "model.safetensors" in files else "onnx"
    kind = "source-only (not adapted)" if card.stage == "source" else f"adapted by the method {last(card.method)}"
    parts = [
        *_front_matter(licence, library),
        f"# {name.partition('/')[2] if name else 'Image classifier'}",
        "",
        f"An image classifier with {len(card.classes)} classes, {MADE_BY} {package_version('cdtrans')}: trained on "
        "labelled source images and unlabelled target images, for images like the target's.",
        "",
        "## Data and training",
        "",
        f"- Source: {_domain(settings.get('source'), source, 'labelled')}",
        f"- Target: {_domain(settings.get('target'), target, 'unlabelled')} {labels}".rstrip(),
        f"- Model: {kind}; epoch {card.epoch}; recipe {settings.get('recipe', 'authors')}, effort "
        f"{settings.get('effort', 'full')}.",
        f"- Backbone: {architecture}, images of {card.crop} pixels. {_start(card, licence)}",
        "- The licences of the images are those of their owners; cdtrans does not know them.",
        "",
        "## How good it is",
        "",
        f"- {_line(_guard(result.get('guard', {})))}",
        f"- {_line(estimate)}",
        f"- Logits are divided by the temperature {card.temperature:.3f}, which is part of the weights. "
        f"{CALIBRATED[calibrated_with(run, model)]}",
        *(["- **It was trained with target labels for an ablation, and says nothing about adaptation.**"] * with_key),
        "",
        "## Limits",
        "",
        "- It knows only these classes: an image of anything else gets one of them, too.",
        "- Accuracy without target labels is an estimate. Label some images and measure before you rely on it.",
        "- Images unlike the target's may be classified worse than by the source-only model.",
        "",
        "## How to load it",
        "",
        *_loading(name, library, onnx="model.onnx" in files),
        "## Classes",
        "",
        *_classes(card.classes, source.get("classes") or {}),
    ]
    return "\n".join(parts) + "\n"


def last(path: str) -> str:
    """The last part of a path, on any system; other words are as they are."""
    return PurePath(str(path).replace("\\", "/")).name


def _data(run: Path) -> dict[str, Any]:
    file = run / "data.json"
    if not file.exists():
        return {}
    with intact(file, AGAIN):
        data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return {name: dict(values) for name, values in data.items() if values}


def _front_matter(licence: str | None, library: str) -> list[str]:
    lines = ["---", "pipeline_tag: image-classification", f"library_name: {library}"]
    tags = ["image-classification", "domain-adaptation", "cdtrans", library]
    tags += ["custom_code"] if library == "transformers" else []
    return [*lines, f"tags: [{', '.join(tags)}]", *([f"license: {licence}"] if licence else []), "---", ""]


def _domain(place: str | None, values: dict[str, Any], kind: str) -> str:
    if not place:
        return "none; the model started from one that was trained before."
    count = counted(values["images"], f"{kind} image") if "images" in values else f"{kind} images"
    return f"'{_line(last(place))}', {count}."


def _guard(guard: dict[str, Any]) -> str:
    """Its verdict and the evidence, without the advice for the person who trained the model."""
    evidence = "; ".join(f"{finding.get('name')}: {finding.get('sentence')}" for finding in guard.get("findings", []))
    opening = guard.get("opening", "The guard did not judge it.")
    return f"{opening} Evidence, all without labels: {ended(evidence)}" if evidence else opening


def _start(card: "Card", licence: str | None) -> str:
    if card.weights.startswith("none"):
        return "Trained from scratch."
    if licence:
        return f"Its pretrained weights are licensed {licence}, according to timm."
    return "It started from weights whose licence cdtrans does not know."


def _loading(name: str | None, library: str, *, onnx: bool) -> list[str]:
    ours = f"hf://{name}" if name else "FOLDER"
    theirs = f"hf-hub:{name}" if name else "local-dir:FOLDER"
    lines = _python("import cdtrans", "", f'cdtrans.load("{ours}").predict("images/")')
    if library == "timm":
        lines += ["or without cdtrans:", ""]
        lines += _python(
            "import timm",
            "",
            f'model = timm.create_model("{theirs}", pretrained=True).eval()',
            "transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))",
        )
    if library != "onnx":
        trust = ", trust_remote_code=True" if library == "transformers" else ""
        pipeline = f'transformers.pipeline("image-classification", model="{name or "FOLDER"}"{trust})'
        lines += ["or with transformers:", "", *_python("import transformers", "", pipeline)]
    if library == "transformers":
        lines += [
            f"`trust_remote_code=True` lets transformers run {' and '.join(f'`{file}`' for file in CODE)}, which lie "
            "beside this card, on your computer: read them first. They need timm, which alone cannot load this model: "
            "its classifier reads several of the last blocks.",
            "",
        ]
    if onnx:
        lines += ["`model.onnx` takes uint8 RGB images, resized to the square that its metadata names.", ""]
    return lines


def _python(*lines: str) -> list[str]:
    return ["```python", *lines, "```", ""]


def _classes(classes: tuple[str, ...], counts: dict[str, int]) -> list[str]:
    rows = [f"| {_line(name)} | {counts.get(name, '')} |" for name in classes[:LISTED]]
    more = len(classes) - LISTED
    return ["| class | source images |", "|---|---|", *rows, *([f"\nand {more} more."] if more > 0 else [])]


def _line(text: str) -> str:
    """Text of a run as one line of Markdown that cannot end a table cell or begin HTML."""
    return printable(" ".join(text.split())).replace("|", "\\|").replace("<", "&lt;")
