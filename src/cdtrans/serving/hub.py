"""The Hugging Face hub: download a model from it, upload a folder to it."""

import re
from collections.abc import Sequence
from pathlib import Path

from cdtrans.errors import CdtransError

HUB_SECONDS = 10.0  # a hub that has not answered by then is out of reach
NAME = re.compile(r"[\w.-]+/[\w.-]+")


def require_name(name: str) -> None:
    if not NAME.fullmatch(name) or "--" in name or ".." in name:
        raise CdtransError(f"'{name}' is not the name of a repository on the Hugging Face hub; give USER/NAME.")


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
        raise CdtransError(f"'{name}' could not be downloaded from the Hugging Face hub: {_cause(error)}.") from error
    return Path(folder)


def upload(folder: Path, name: str, *, private: bool) -> str:
    """Make the repository unless it exists, and upload the folder; returns the address."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload a model by cdtrans")
    except Exception as error:  # as above
        raise CdtransError(f"'{name}' could not be uploaded to the Hugging Face hub: {_cause(error)}.") from error
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
