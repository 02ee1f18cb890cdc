"""The folder of many runs: one process at a time owns it, and all runs share one recipe."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cdtrans.config import RESUME_MAY_CHANGE, CDTransOptions, Config, flat, merged, read_yaml
from cdtrans.errors import CdtransError, first_of
from cdtrans.methods import method_class
from cdtrans.record.files import atomic, try_lock
from cdtrans.runtime.ranks import launched_world

# Defaults of every run: without the guard a row shows what its method did (its verdict is in the run folder anyway),
# and nobody reads so many reports.
TABLE_DEFAULTS = {"guard": False, "report": False}


@contextmanager
def owned(out: Path, record: str, recipe: dict[str, Any], kind: str) -> Iterator[None]:
    """Lock the folder for this process and this recipe, which is saved as `record`. `kind` is what the folder belongs
    to, with its article."""
    if launched_world() > 1:
        raise CdtransError(
            f"The runs of {kind} are processes of their own; start the command in one process, with --jobs N for "
            "several runs in parallel."
        )
    _check_folder(out, record, recipe, kind)
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = try_lock(out / ".lock")
    except OSError as error:
        raise CdtransError(f"The folder '{out}' cannot be written: {error.strerror}; choose another --out.") from error
    if lock is None:
        bare = kind.split(maxsplit=1)[1]  # without the article
        raise CdtransError(f"Another process is running the {bare} in '{out}'; choose another --out.")
    with lock:
        _check_folder(out, record, recipe, kind)
        with atomic(out / record) as file:
            file.write((json.dumps(recipe, indent=2, sort_keys=True) + "\n").encode())
        yield


def recipe_of(config: Config, decided: tuple[str, ...]) -> dict[str, Any]:
    """The settings that all runs of a folder share, with all options of the method: not those `decided` run by run, nor
    the machine. The guard may change when a single run resumes, but it decides which model is selected, so it is the
    same in a whole table."""
    free = {*decided, *(f"method.{name}" for name in decided), *RESUME_MAY_CHANGE} - {"guard"}
    options = asdict(method_class(config.method).Options()) | config.method_args
    return {key: value for key, value in flat(config.to_dict() | {"method_args": options}).items() if key not in free}


def with_table_defaults(settings: dict[str, Any], config: Path | None) -> dict[str, Any]:
    """These settings, and TABLE_DEFAULTS for what neither they nor the file `config` set."""
    from_file = read_yaml(config) if config is not None else {}
    return {name: value for name, value in TABLE_DEFAULTS.items() if name not in from_file} | settings


def flags(settings: dict[str, Any]) -> tuple[str, ...]:
    """Settings as `cdtrans adapt` takes them; options of the method as --set."""
    words = []
    for name, value in settings.items():
        dashed = name.replace("_", "-")
        if name == "method_args":
            words += [f"--set={key}={json.dumps(option)}" for key, option in value.items()]
        elif isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{dashed}")
        else:
            words.append(f"--{dashed}={value}")
    return tuple(words)


def _read(file: Path) -> dict[str, Any]:
    try:
        recorded: dict[str, Any] = dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise CdtransError(
            f"'{file}', the recipe of the runs in this folder, is damaged; restore it, or choose another --out."
        ) from error
    return recorded


def _check_folder(out: Path, record: str, recipe: dict[str, Any], kind: str) -> None:
    """Refuse a folder with other contents. Writes nothing."""
    file = out / record
    if file.exists():
        older = Config().to_dict() | asdict(CDTransOptions()) | TABLE_DEFAULTS  # of what an older one lacks
        before = flat(merged(older)) | flat({"method_args": {}} | _read(file))
        changed = [key for key in recipe if before.get(key) != recipe[key]]
        if changed:
            what = first_of([f"{key}: {before.get(key)} there, {recipe[key]} now" for key in changed])
            bare = kind.split(maxsplit=1)[1]  # without the article
            raise CdtransError(f"'{out}' holds another {bare}'s runs ({what}); choose another --out.")
    elif out.exists() and (not out.is_dir() or any(p.name not in (".lock", f".{record}.draft") for p in out.iterdir())):
        raise CdtransError(f"'{out}' exists and is not {kind}'s folder; choose another --out.")
