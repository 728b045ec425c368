"""`tandem scale`: keeps the pools of a Kubernetes cluster as large as its router's reports ask for."""

from __future__ import annotations

import argparse
import sys
import time
import urllib.request
from collections.abc import Callable
from typing import Protocol

from tandem.deploy.scale.kubernetes import Deployments
from tandem.deploy.scale.pools import OF_ROLE, Bounds, PoolScaler
from tandem.deploy.scale.reading import seen_in
from tandem.engine.contracts.errors import ConfigError

ANSWER_S = 10.0  # a guess


class Target(Protocol):
    """Where pools are."""

    def sizes(self) -> dict[str, int]: ...

    def resize(self, pool: str, number: int) -> None: ...


def run(arguments: argparse.Namespace) -> int:
    """Looks every `every_s` seconds until it is ended; once with `once`, 1 then where somebody did not answer. Raises
    ConfigError for pools that make no sense."""
    names, bounds = pools_of(arguments.pool)
    target = Deployments(names, arguments.namespace, arguments.api_server, arguments.token_file)
    scaler = PoolScaler(bounds, arguments.idle_s)
    metrics = f"{arguments.url.rstrip('/')}/metrics"
    while True:
        try:
            with urllib.request.urlopen(metrics, timeout=ANSWER_S) as answer:
                exposition = answer.read().decode()
            look(scaler, exposition, target, time.monotonic(), _say, is_dry=arguments.dry_run)
        except (OSError, ValueError) as error:
            _say(f"nothing is changed: {error}")
            if arguments.once:
                return 1
        if arguments.once:
            return 0
        time.sleep(arguments.every_s)


def look(
    scaler: PoolScaler, exposition: str, target: Target, now: float, say: Callable[[str], None], *, is_dry: bool
) -> None:
    """Has the target change what the scaler asks for, or, if `is_dry`, only says it. Raises OSError, ValueError."""
    sizes = target.sizes()
    for pool, number in scaler.look(seen_in(exposition), sizes, now).items():
        say(f"{pool}: {sizes[pool]} -> {number}{', if this were no dry run' * is_dry}")
        if not is_dry:
            target.resize(pool, number)


def pools_of(given: tuple[str, ...]) -> tuple[dict[str, str], dict[str, Bounds]]:
    """Deployments and bounds by role, from ROLE=DEPLOYMENT:LEAST:MOST. Raises ConfigError."""
    names, bounds = {}, {}
    for each in given:
        role, _, rest = each.partition("=")
        parts = rest.split(":")
        if role not in OF_ROLE or len(parts) != 3 or not all(map(str.isdecimal, parts[1:])):
            raise ConfigError(f"--pool {each}: it must be ROLE=DEPLOYMENT:LEAST:MOST, as prefill=tandem-prefill:1:4")
        names[role], bounds[role] = parts[0], Bounds(int(parts[1]), int(parts[2]))
        if bounds[role].least > bounds[role].most or not bounds[role].most:
            raise ConfigError(f"--pool {each}: {parts[1]} at least and {parts[2]} at most leave nothing to choose")
    if not names:
        raise ConfigError("--pool ROLE=DEPLOYMENT:LEAST:MOST names a pool; give one for each role")
    return names, bounds


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
