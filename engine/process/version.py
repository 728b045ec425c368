"""Which version of Tandem this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version


def version() -> str:
    """As the installed package says."""
    try:
        return installed_version("tandem-serve")
    except PackageNotFoundError:  # out of a folder on PYTHONPATH
        return "unknown"
