"""How every process of Tandem writes its log: to standard error, a line with time and place for each record."""

from __future__ import annotations

import logging
import sys

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def start_log() -> None:
    """Idempotent. Libraries speak from warnings on."""
    logging.basicConfig(level=logging.WARNING, format=FORMAT, stream=sys.stderr)
    logging.getLogger("tandem").setLevel(logging.INFO)
