"""What every child process of the launcher does first: die with its parent, leave the terminal's signals to it."""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent() -> None:
    """For `preexec_fn`: the kernel sends SIGKILL when the *thread* that started this child ends. No-op off Linux."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
