"""Who reads a command's output may leave before its end, as `head` does."""

from __future__ import annotations

import select


def nobody_reads(descriptor: int) -> bool:
    """Whether it is a pipe whose other end was closed."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))
