"""How every process of Tandem writes its log: to standard error, a line with time and place for each record."""

from __future__ import annotations

import logging
import sys

from tandem.engine.config import LogLevel

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def start_log(level: LogLevel = "info") -> None:
    """May be called again, with another level. Libraries speak from warnings on."""
    logging.basicConfig(level=logging.WARNING, format=FORMAT, stream=sys.stderr)
    logging.getLogger("tandem").setLevel(level.upper())
