"""Cheaper interpreted kernels, where a process interprets."""

from __future__ import annotations

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    import interpreted_once  # noqa: F401  # for what it does
