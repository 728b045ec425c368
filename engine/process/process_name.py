"""The name under which ps and top show a process."""

from __future__ import annotations

import ctypes
import re
import sys

_PR_SET_NAME = 15
MOST_BYTES = 15  # what the kernel keeps
_RANDOM_SUFFIX = re.compile(r"-[0-9a-f]{6}(?= |$)")


def name_process(name: str) -> None:
    """Names the calling process `tandem NAME`, or NAME where that is too long, without a node id's random end. To be
    called by its first thread; threads that start afterwards are called the same. No-op off Linux."""
    short = _RANDOM_SUFFIX.sub("", name)
    shown = f"tandem {short}" if len(short) + 7 <= MOST_BYTES else short
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, ctypes.c_char_p(shown.encode()), 0, 0, 0)
