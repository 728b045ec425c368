"""A folder for what the processes of one router share, gone when the router is, at the latest when the next starts."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "tandem-workers-"
logger = logging.getLogger(__name__)


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """A new folder, locked as long as this process lives: one that is found unlocked is no longer used by anybody."""
    remove_abandoned()
    path, lock = _make()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def remove_abandoned() -> None:
    """Removes this user's folders whose routers were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # somebody else's, in use, or just removed by another router
            lock = _lock(path)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    shutil.rmtree(path, ignore_errors=True)
                    logger.info("removed %s, which a killed router left behind", path)
            finally:
                os.close(lock)


def _make() -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX))
        with contextlib.suppress(OSError):  # another router took it for abandoned before it was locked
            lock = _lock(path)
            if path.exists():
                return path, lock
            os.close(lock)


def _lock(path: Path) -> int:
    """A descriptor that holds the lock on the folder itself. Raises OSError when another process holds it."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(folder)
        raise
    return folder
