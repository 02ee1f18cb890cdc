"""The verbs that only the command line has: `methods` and `cache`."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from cdtrans.inputs.pixels import StoreInfo, cache_folder, clear_stores, list_stores as every_store
from cdtrans.methods import METHODS, require_method
from cdtrans.runtime.signals import importing
from cdtrans.schema import Help


def describe_methods(
    name: Annotated[str | None, Help("Show the options of this method (also FILE.py:CLASS).", "[NAME]")] = None,
) -> list[dict[str, Any]]:
    """The adaptation methods, or the one of this name."""
    if name is not None:
        require_method(name)
    with importing():
        from cdtrans.methods import method_class

    return [_description(each, method_class(each)) for each in ([name] if name else METHODS)]


def _description(name: str, method: Any) -> dict[str, Any]:
    """The promised keys of a method in `methods --json`."""
    summary = next(iter((method.__doc__ or name).strip().splitlines()), name).rstrip(".")
    options = [
        {"name": f.name, "default": f.default, "help": f.metadata.get("help", "")} for f in fields(method.Options)
    ]
    facts = {key: getattr(method, key) for key in ("paper", "title", "backbones")}
    cost = METHODS[name]["cost"] if name in METHODS else "?"
    return {"name": name, "summary": summary, **facts, "cost": cost, "options": options}


@dataclass(frozen=True)
class Cache:
    """The decoded images in a cache folder."""

    folder: Path
    stores: list[StoreInfo]
    below: list[str]  # folders below the requested one, which have stores of their own
    freed: int = 0  # bytes

    def summary(self) -> dict[str, Any]:
        """The promised keys of `cache --json`."""
        stores = [{"root": str(s.root), "size": s.size, "images": s.images, "bytes": s.nbytes} for s in self.stores]
        return {"cache": str(self.folder), "stores": stores, "below": self.below, "freed": self.freed}


def list_cache(
    *,
    folder: Annotated[Path | None, Help("The cache folder.", flag="--cache")] = None,
    clear: Annotated[bool, Help("Delete what is listed; later runs decode the images again.")] = False,
    root: Annotated[Path | None, Help("Only images decoded for exactly this folder, as given to a run.")] = None,
) -> Cache:
    """The stores of decoded images that runs share; with `clear` they are deleted."""
    place = folder or cache_folder()
    stores = every_store(place)
    below = sorted({str(s.root) for s in stores if root is not None and root.resolve() in s.root.parents})
    stores = [s for s in stores if root is None or s.root == root.resolve()]
    return Cache(place, stores, below, clear_stores(place, root) if clear else 0)
