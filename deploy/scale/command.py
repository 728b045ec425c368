"""`tandem scale`: keeps the pools of a Kubernetes cluster as large as its router's reports ask for."""

from __future__ import annotations

import argparse
import signal
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from typing import Protocol
from urllib.parse import urlsplit

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
    """Looks every `every_s` seconds until SIGTERM; once with `once`, 1 then where somebody did not answer. Raises
    ConfigError for pools that make no sense."""
    names, bounds = pools_of(arguments.pool)
    target = Deployments(names, arguments.namespace, arguments.api_server, arguments.token_file)
    scaler, ended = PoolScaler(bounds, arguments.idle_s), threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: ended.set())  # a container's first process would not end by it
    try:
        while True:
            try:
                shown = ask_routers(arguments.url)
                look(scaler, shown, target, time.monotonic(), _say, is_dry=arguments.dry_run)
            except (OSError, ValueError) as error:
                _say(f"nothing is changed: {error}")
                if arguments.once:
                    return 1
            if arguments.once or ended.wait(arguments.every_s):
                return 0
    finally:
        signal.signal(signal.SIGTERM, before)


def ask_routers(url: str) -> dict[str, str]:
    """The metrics of each router that stands behind the name in `url` and answers, by its address. With https there is
    one, for certificates name no addresses. Raises OSError when none answers."""
    parts = urlsplit(url.rstrip("/") + "/metrics")
    if parts.scheme == "https":
        return {url: _get(parts.geturl())}
    port, failed = parts.port or 80, OSError(f"{url} names no router")
    found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    for family in (socket.AF_INET, socket.AF_INET6):  # a router that has both must not count twice
        shown = {}
        for address in sorted({str(each[4][0]) for each in found if each[0] == family}):
            place = f"[{address}]:{port}" if family == socket.AF_INET6 else f"{address}:{port}"
            try:
                shown[place] = _get(parts._replace(netloc=place).geturl())
            except OSError as error:
                failed = error
        if shown:
            return shown
    raise failed


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=ANSWER_S) as answer:
        text: str = answer.read().decode()
        return text


def look(
    scaler: PoolScaler,
    shown: Mapping[str, str],
    target: Target,
    now: float,
    say: Callable[[str], None],
    *,
    is_dry: bool,
) -> None:
    """Has the target change what the scaler asks for, or, if `is_dry`, only says it. `shown`: the metrics of each
    router. Raises OSError, ValueError."""
    sizes = target.sizes()
    for pool, number in scaler.look(seen_in(shown), sizes, now).items():
        say(f"{pool}: {sizes[pool]} -> {number}{', if this were no dry run' * is_dry}")
        if not is_dry:
            target.resize(pool, number)


def pools_of(given: tuple[str, ...]) -> tuple[dict[str, str], dict[str, Bounds]]:
    """Deployments and bounds by role, from ROLE=DEPLOYMENT:LEAST:MOST. Raises ConfigError."""
    names: dict[str, str] = {}
    bounds: dict[str, Bounds] = {}
    for each in given:
        role, _, rest = each.partition("=")
        parts = rest.split(":")
        if role not in OF_ROLE or len(parts) != 3 or not all(map(str.isdecimal, parts[1:])):
            raise ConfigError(f"--pool {each}: it must be ROLE=DEPLOYMENT:LEAST:MOST, as prefill=tandem-prefill:1:4")
        if role in names:
            raise ConfigError(f"--pool {each}: there is one of {role} already, {names[role]}; a role has one pool")
        names[role], bounds[role] = parts[0], Bounds(int(parts[1]), int(parts[2]))
        if bounds[role].least > bounds[role].most or not bounds[role].most:
            raise ConfigError(f"--pool {each}: {parts[1]} at least and {parts[2]} at most leave nothing to choose")
    if not names:
        raise ConfigError("--pool ROLE=DEPLOYMENT:LEAST:MOST names a pool; give one for each role")
    return names, bounds


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
