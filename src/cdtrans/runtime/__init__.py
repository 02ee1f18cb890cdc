"""The machine: devices, ranks, processes, signals, the screen, and the versions of packages."""

from importlib.metadata import version


def package_version(package: str) -> str:
    try:
        return version(package)
    except ModuleNotFoundError:
        return "not installed"
