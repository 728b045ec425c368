"""Which version of Tandem this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version


def version() -> str:
    """The version that the installed package states."""
    try:
        return installed_version("tandem-serve")
    except PackageNotFoundError:  # out of a folder on PYTHONPATH
        return "unknown"
