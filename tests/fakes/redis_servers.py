"""Redis as it stands in production, on loopback: a cluster of three, a pair under sentinels, users with few rights."""

from __future__ import annotations

import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import redis
from waiting import wait_until

from tandem.deploy.launch.child_process import die_with_parent
from tandem.deploy.redis_server import PORTS, find_redis_server, free_port

NUM_SLOTS = 16_384
BUS = 10_000  # between a server's port and that of its cluster's bus
FIRST_OF_SYSTEM = 32_768  # Linux's default


def bus_port() -> int:
    """Free for a cluster's server, which also listens on its port + 10,000: that is none of those that `free_port`
    gives to other tests, nor a port that systems serve connections from."""
    while not PORTS.stop - BUS <= (port := free_port()) < FIRST_OF_SYSTEM - BUS:
        pass
    return port


def until(condition: Callable[[], bool], what: str) -> None:
    """A server that is asked by the condition may be on its way up."""

    def holds() -> bool:
        try:
            return condition()
        except redis.RedisError:
            return False

    wait_until(holds, what)


class Server:
    """One redis-server (or sentinel) with a configuration file in `folder`, which survives a restart."""

    def __init__(self, folder: Path, lines: Sequence[str], port: int, *arguments: str) -> None:
        self.folder, self.port, self._arguments = folder, port, arguments
        folder.mkdir(exist_ok=True)
        self._config = folder / "redis.conf"
        common = ["bind 127.0.0.1", f"dir {folder}", 'save ""', "appendonly no", "protected-mode no"]
        self._config.write_text("\n".join([*common, *lines]) + "\n")
        self.start()

    def start(self) -> None:
        command = [find_redis_server(), str(self._config), *self._arguments]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=die_with_parent)
        until(self._listens, f"a redis-server on {self.port}: {self.log()}")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port)

    def _listens(self) -> bool:
        assert self._process.poll() is None, self.log()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


@contextmanager
def _servers() -> Iterator[tuple[Path, Callable[..., Server]]]:
    """A folder, and a function that starts servers which end with the block."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-redis-")))

        def start(name: str, lines: Sequence[str], port: int, *arguments: str) -> Server:
            server = Server(folder / name, lines, port, *arguments)
            stack.callback(server.kill)
            return server

        yield folder, start


@dataclass
class Cluster:
    servers: list[Server]
    login: str

    @property
    def url(self) -> str:
        places = ",".join(f"127.0.0.1:{server.port}" for server in self.servers)
        return f"redis+cluster://{self.login}@{places}"

    def owner_of(self, key: str) -> Server:
        slot = redis.crc.key_slot(key.encode())
        return self.servers[slot * len(self.servers) // NUM_SLOTS]

    def is_whole(self) -> bool:
        infos = [server.client().execute_command("CLUSTER INFO") for server in self.servers]
        return all(
            info["cluster_state"] == "ok" and info["cluster_known_nodes"] == str(len(self.servers)) for info in infos
        )


@contextmanager
def running_cluster(rights: str, num_servers: int = 3) -> Iterator[Cluster]:
    """`rights`: of the user that `url` names; the tests' own clients may do anything."""
    with _servers() as (_, start):
        servers = []
        for number in range(num_servers):
            port = bus_port()
            lines = [
                f"port {port}",
                "cluster-enabled yes",
                "cluster-node-timeout 1000",
                f"user tandem on >secret {rights}",
            ]
            servers.append(start(f"node-{number}", [*lines, "cluster-require-full-coverage no"], port))
        cluster = Cluster(servers, "tandem:secret")
        owners = [slot * num_servers // NUM_SLOTS for slot in range(NUM_SLOTS)]
        for number, server in enumerate(servers):
            own = [slot for slot in range(NUM_SLOTS) if owners[slot] == number]
            server.client().execute_command("CLUSTER", "ADDSLOTS", *own)
            server.client().execute_command("CLUSTER", "MEET", "127.0.0.1", servers[0].port)
        until(cluster.is_whole, "a whole cluster")
        yield cluster


@dataclass
class Watched:
    """A server, its replica, and the sentinels that watch them."""

    pair: list[Server]
    sentinels: list[Server]

    @property
    def url(self) -> str:
        places = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{places}/tandem-master"

    def master_port(self) -> int:
        return int(self.sentinels[-1].client().sentinel_get_master_addr_by_name("tandem-master")[1])


@contextmanager
def running_sentinels() -> Iterator[Watched]:
    with _servers() as (_, start):
        ports = [free_port(), free_port()]
        first = start("first", [f"port {ports[0]}", "repl-diskless-sync-delay 0"], ports[0])
        second = start("second", [f"port {ports[1]}", f"replicaof 127.0.0.1 {ports[0]}"], ports[1])
        lines = [
            f"sentinel monitor tandem-master 127.0.0.1 {ports[0]} 2",
            "sentinel down-after-milliseconds tandem-master 500",
            "sentinel failover-timeout tandem-master 3000",
        ]
        sentinels = []
        for number in range(2):
            port = free_port()
            sentinels.append(start(f"sentinel-{number}", [f"port {port}", *lines], port, "--sentinel"))
        watched = Watched([first, second], sentinels)

        def all_know_each_other() -> bool:
            infos = [each.client().sentinel_master("tandem-master") for each in sentinels]
            return all(info["num-other-sentinels"] == 1 and info["num-slaves"] == 1 for info in infos)

        until(all_know_each_other, "sentinels that know each other and the replica")
        yield watched


@contextmanager
def running_with_users(users: Sequence[str]) -> Iterator[Server]:
    """A server whose ACL file holds `users`; nobody else gets in."""
    with _servers() as (folder, start):
        acl, port = folder / "users.acl", free_port()
        acl.write_text("\n".join(["user default off", *users]) + "\n")
        yield start("server", [f"port {port}", f"aclfile {acl}"], port)
