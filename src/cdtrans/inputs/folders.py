"""Find the images in a folder and below it, and files that may be images."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from cdtrans.errors import CdtransError
from cdtrans.inputs.images import ARCHIVE_LEFTOVERS, IMAGE_SUFFIXES, is_image_name
from cdtrans.inputs.tars import is_tar_name

_Kind = Literal["folder", "image", "ignored"]

# Files that often lie beside images and are clearly not images.
_TEXT_SUFFIXES = {
    *(".txt", ".md", ".rst", ".csv", ".tsv", ".json", ".jsonl", ".xml", ".yaml", ".yml", ".toml", ".ini", ".cfg"),
    *(".log", ".html", ".htm", ".xmp", ".aae", ".py", ".ipynb", ".sh", ".parquet", ".part"),
}
_PLAIN_NAMES = {
    *("readme", "license", "licence", "copying", "notice", "changelog", "citation"),
    *("thumbs.db", "ehthumbs.db"),
}


def is_folder(where: Path) -> bool:
    """True for a folder, False for a file that may be a list."""
    try:
        mode = where.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CdtransError(f"{quoted(where)} does not exist: check the path.") from error
    except OSError as error:
        raise cannot_read(where, error) from error
    if stat.S_ISDIR(mode):
        return True
    if not stat.S_ISREG(mode) or is_image_name(where.name):
        raise CdtransError(f"{quoted(where)} is neither a folder of images nor a list: give one of the two.")
    return False


def files_below(top: Path) -> tuple[list[str], list[str]]:
    """The images below a folder, and ignored files that may be images."""
    images: list[str] = []
    ignored: list[str] = []
    for path, is_image in walk(top):
        (images if is_image else ignored).append(path)
    if not images:
        raise no_image(top, next(iter(ignored), ""))
    return images, ignored


def no_image(top: Path, ignored: str) -> CdtransError:
    """`ignored` is the first ignored file that may be an image, or empty."""
    suffixes = ", ".join(sorted(IMAGE_SUFFIXES))
    others, convert = (f", only files such as {ignored!r}", "convert them, or ") if ignored else ("", "")
    return CdtransError(
        f"No image was found in {quoted(top)} or below it{others}: {convert}check the path ({suffixes} are read)."
    )


def walk(top: Path) -> Iterator[tuple[str, bool]]:
    """The files below a folder that are images (True) or may be images (False), sorted by name on each level, so the
    order does not depend on the file system.

    Hidden files, text files and files of the operating system are left out. Links to folders outside `top` are
    followed, but no folder is entered twice; links to folders inside `top` are skipped, because those are visited
    anyway. A broken link with the suffix of an image or tar counts as one, so that it is reported as unreadable.
    """
    real_top = os.path.realpath(top) + os.sep
    entered: set[tuple[int, int]] = set()
    pending: list[tuple[str, _Kind]] = [("", "folder")]
    while pending:
        path, kind = pending.pop()
        if kind != "folder":
            yield path, kind == "image"
            continue
        identity, entries = listing(top / path)
        if identity in entered:
            continue
        entered.add(identity)
        for entry in reversed(entries):
            below = f"{path}/{entry.name}" if path else entry.name
            if is_subfolder(entry):
                if not (entry.is_symlink() and (os.path.realpath(entry.path) + os.sep).startswith(real_top)):
                    pending.append((below, "folder"))
            elif _is_image(entry):
                pending.append((below, "image"))
            elif _may_be_image(entry):
                pending.append((below, "ignored"))


def listing(folder: Path) -> tuple[tuple[int, int], list[os.DirEntry]]:
    """A folder's device and inode, which identify it through any link, and its entries sorted by name."""
    try:
        status = folder.stat()
        with os.scandir(folder) as entries:
            shown = [entry for entry in entries if not entry.name.startswith(".") and entry.name != ARCHIVE_LEFTOVERS]
    except OSError as error:
        raise cannot_read(folder, error) from error
    return (status.st_dev, status.st_ino), sorted(shown, key=lambda entry: entry.name)


def is_subfolder(entry: os.DirEntry) -> bool:
    return os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()


def _is_image(entry: os.DirEntry) -> bool:
    if not is_image_name(entry.name):
        return False
    return _is_file(entry) or (entry.is_symlink() and not os.path.exists(entry.path))


def _may_be_image(entry: os.DirEntry) -> bool:
    """Whether a user may expect it to be read: an image of another format, or one without a suffix."""
    name = entry.name.lower()
    if is_image_name(name) or name in _PLAIN_NAMES or os.path.splitext(name)[1] in _TEXT_SUFFIXES:
        return False
    return _is_file(entry) or (is_tar_name(name) and entry.is_symlink() and not os.path.exists(entry.path))


def _is_file(entry: os.DirEntry) -> bool:
    """Never an error, as DirEntry.is_file has for a link that leads to itself."""
    return os.path.isfile(entry.path) if entry.is_symlink() else entry.is_file()


def cannot_read(where: Path, error: OSError) -> CdtransError:
    reason = "no permission" if isinstance(error, PermissionError) else error.strerror
    return CdtransError(f"{quoted(where)} cannot be read ({reason}): make it readable, or leave it out of the data.")


def quoted(path: Path) -> str:
    """repr, because the newlines and undecodable bytes of odd names must not break the sentence or the terminal."""
    return repr(str(path))
