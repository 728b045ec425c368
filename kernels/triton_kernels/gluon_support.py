"""Whether the Gluon of the installed Triton, another one in each release, is one that our kernels are tested with."""

from __future__ import annotations

from functools import cache

TESTED_VERSIONS = ((3, 6), (3, 8))  # first and last release that our Gluon kernels are compiled with in tests


@cache
def why_no_gluon() -> str | None:
    """Why Gluon kernels can't be used here; None: they can."""
    try:
        import triton
    except ImportError:
        return "triton is not installed"
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    first, last = TESTED_VERSIONS
    if not first <= version <= last:
        names = (".".join(map(str, known)) for known in (first, last))
        return f"Gluon of triton {triton.__version__} is untested; known are {' to '.join(names)}"
    return None
