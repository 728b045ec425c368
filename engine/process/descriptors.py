"""How many file descriptors a process may have. Every connection takes one, a connection to a node about five."""

from __future__ import annotations

import resource

# A guess. Some systems allow a thousand million, and libraries that go through all of them then take minutes.
MOST = 1 << 20


def raise_descriptor_limit() -> int:
    """Raises the soft limit to the hard one, which is what it is for: the soft one is 1,024 on many systems, for the
    sake of programs that use select(). To be called once, at the start of a process; its children inherit it. Returns
    the limit that holds then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return descriptor_limit()


def descriptor_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else soft
