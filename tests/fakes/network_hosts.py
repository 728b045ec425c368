"""Hosts for tests: network namespaces of this machine, each with an address and one cable to a common switch."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


@dataclass(frozen=True)
class Host:
    """`prefix` before a command runs it there."""

    name: str
    address: str

    @property
    def prefix(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.name)

    def unplug(self) -> None:
        _ip("link", "set", f"{self.name}c", "down")

    def plug_in(self) -> None:
        _ip("link", "set", f"{self.name}c", "up")


@dataclass(frozen=True)
class Network:
    """`address` is this process's own in the network of `hosts`."""

    address: str
    hosts: tuple[Host, ...]


def can_make_hosts() -> bool:
    """Whether this process may make network namespaces."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        return False
    name = f"td{os.getpid()}t"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, timeout=30).returncode == 0
    if made:
        _ip("netns", "del", name)
    return made


@contextlib.contextmanager
def network(num_hosts: int) -> Iterator[Network]:
    """Makes hosts, and takes them away in the end."""
    own = os.getpid()
    switch, subnet = f"td{own}s", f"10.213.{own % 256}"
    hosts = tuple(Host(f"td{own}h{number}", f"{subnet}.{number}") for number in range(1, num_hosts + 1))
    try:
        _ip("link", "add", switch, "type", "bridge")
        _ip("addr", "add", f"{subnet}.254/24", "dev", switch)
        _ip("link", "set", switch, "up")
        for host in hosts:
            _ip("netns", "add", host.name)
            _ip("link", "add", f"{host.name}c", "type", "veth", "peer", "name", "eth0", "netns", host.name)
            _ip("link", "set", f"{host.name}c", "master", switch, "up")
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
            _ip("-n", host.name, "link", "set", "eth0", "up")
            _ip("-n", host.name, "link", "set", "lo", "up")
        yield Network(f"{subnet}.254", hosts)
    finally:
        for words in (*(("netns", "del", host.name) for host in hosts), ("link", "del", switch)):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip(*words)
