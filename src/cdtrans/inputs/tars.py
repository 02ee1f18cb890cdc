"""Images in tar files, as webdataset writes them: found by their headers and read without unpacking the tar."""

import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cdtrans.inputs.images import ARCHIVE_LEFTOVERS, UnreadableImage, is_image_name

_NAMES = (".tar", ".tgz", ".tbz2", ".txz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst")
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")  # gzip, bzip2, xz, zstd


@dataclass(frozen=True, slots=True)
class TarMember:
    """An image in a tar, or a placeholder for images that cannot be read."""

    path: Path  # TAR/NAME, for display
    tar: Path
    offset: int = 0
    size: int = 0
    problem: str = ""  # why it cannot be read

    def read(self) -> bytes:
        if self.problem:
            raise UnreadableImage(self.problem)
        with open(self.tar, "rb") as file:
            file.seek(self.offset)
            return file.read(self.size)


def is_tar_name(name: str) -> bool:
    """Also true for compressed tars, which cannot be read: `members` then gives one member that says so."""
    return name.lower().endswith(_NAMES)


def members(tar: Path) -> Iterator[TarMember]:
    """The images of a tar in its order; other files, such as labels and captions, are left out. If the tar is damaged
    or cut short, the images before the damage are given, then one more member that names the problem."""
    try:
        with open(tar, "rb") as file, tarfile.open(fileobj=file, mode="r:", errors="surrogateescape") as archive:
            length = os.fstat(file.fileno()).st_size
            while (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # otherwise it keeps all of them in memory
                if member.offset_data + member.size > length:
                    raise tarfile.ReadError("it ends too early")
                if not member.isdir() and _is_image(member.name):
                    plain = member.isreg() and not member.issparse()
                    problem = "" if plain else "a link or another special file in the tar"
                    yield TarMember(Path(f"{tar}/{member.name}"), tar, member.offset_data, member.size, problem)
            file.seek(archive.offset)
            end = file.read(tarfile.RECORDSIZE)
            if any(end[: tarfile.BLOCKSIZE] or b"1"):  # a tar ends with blocks of zeros
                raise tarfile.ReadError("it has no end mark")
            if any(end):
                raise tarfile.ReadError("another tar follows after its end; separate them")
    except Exception as error:  # on damaged headers, tarfile raises almost anything
        yield TarMember(tar, tar, problem=_why(tar, error))


def _is_image(name: str) -> bool:
    *folders, base = name.split("/")
    return is_image_name(base) and not base.startswith(".") and ARCHIVE_LEFTOVERS not in folders


def _why(tar: Path, error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"cannot be read ({error.strerror})"
    with open(tar, "rb") as file:
        if file.read(8).startswith(_COMPRESSED):
            return "a compressed tar; decompress it first"
    return f"a damaged or truncated tar ({error}); the images after the damage are missing"
