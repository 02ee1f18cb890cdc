"""The versions of the packages that a run uses."""

from importlib.metadata import version


def package_version(package: str) -> str:
    try:
        return version(package)
    except ModuleNotFoundError:
        return "not installed"
