"""`tandem hash-key`: an API key as a keys file may hold it, so that who reads the file can't use it."""

from __future__ import annotations

import getpass
import hashlib
import secrets
import sys

from tandem.engine.contracts.errors import ConfigError
from tandem.router.access.keys_file import HASHED


def run(makes_one: bool) -> int:
    """Prints the hash of a key that is made up and shown, or is typed, or comes from a pipe."""
    if makes_one:
        key = f"sk-{secrets.token_urlsafe(32)}"
        print(f"the key, which is shown this once: {key}", file=sys.stderr)
    else:
        key = getpass.getpass("API key: ") if sys.stdin.isatty() else sys.stdin.readline()
    if len(key.split()) != 1:
        raise ConfigError("an API key is one word: no client can send white space")
    print(HASHED + hashlib.sha256(key.strip().encode()).hexdigest())
    return 0
