"""Redis URLs and the clients for them: one server, a cluster, or whichever server its sentinels name.

    redis://[user:password@]host:port[/db]                              one server; unix:// likewise
    redis+cluster://[user:password@]host:port[,host:port…]              any nodes of a Redis Cluster, the rest is found
    redis+sentinel://[user:password@]host:port[,host:port…]/service[/db] sentinels, and the name of what they watch

`rediss` in place of `redis` asks for TLS. Options follow after `?` as redis-py takes them (`ssl_ca_certs=/path`, …);
those that begin with `sentinel_` are for the connections to sentinels (`sentinel_username=…`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

import redis
import redis.asyncio as aioredis
from redis.asyncio.client import PubSub
from redis.asyncio.cluster import ClusterNode as AsyncClusterNode
from redis.asyncio.retry import Retry as AsyncRetry
from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode
from redis.connection import SSLConnection, parse_url
from redis.retry import Retry
from redis.sentinel import Sentinel

from tandem.engine.contracts.errors import ConfigError

Kind = Literal["single", "cluster", "sentinel"]
SCHEMES: dict[str, Kind] = {
    "redis": "single",
    "rediss": "single",
    "unix": "single",
    "redis+cluster": "cluster",
    "rediss+cluster": "cluster",
    "redis+sentinel": "sentinel",
    "rediss+sentinel": "sentinel",
}
DEFAULT_PORTS: dict[Kind, int] = {"single": 6379, "cluster": 6379, "sentinel": 26379}
SENTINEL_OPTION = "sentinel_"
BEGINNING = re.compile(r"(?P<scheme>[a-z+]+)://(?P<netloc>[^/?#]*)")


def is_wrong_type(error: redis.ResponseError) -> bool:
    """Whether the error says that a key of ours holds another type. Other errors are the server's, and may pass."""
    return str(error).startswith("WRONGTYPE")


@dataclass(frozen=True)
class RedisAddress:
    """A parsed URL. `options` are keyword arguments of connections; for a single server they name it too."""

    kind: Kind
    hosts: tuple[tuple[str, int], ...]
    service: str  # the name that sentinels watch
    options: dict[str, Any]
    sentinel_options: dict[str, Any]


def parse_redis_url(url: str) -> RedisAddress:
    """Parses a URL. Raises ConfigError that says what is wrong without repeating passwords."""
    beginning = BEGINNING.match(url)  # urllib refuses several hosts of which one is an IPv6 address
    if beginning is None or beginning["scheme"] not in SCHEMES:
        raise ConfigError(
            f"--redis-url must begin with {', '.join(f'{scheme}://' for scheme in SCHEMES)}: see docs/directory.md"
        )
    try:
        return _parse(SCHEMES[beginning["scheme"]], url, beginning["netloc"])
    except ValueError as error:
        raise ConfigError(f"--redis-url can't be read: {error}; see docs/directory.md") from None


def _parse(kind: Kind, url: str, netloc: str) -> RedisAddress:
    login, at, places = netloc.rpartition("@")
    first = places.split(",")[0]
    one = url.replace(netloc, login + at + first, 1).replace("+cluster", "", 1).replace("+sentinel", "", 1)
    service = ""
    if kind == "sentinel":
        parts = urlsplit(one)
        service, _, database = parts.path.strip("/").partition("/")
        if not service:
            raise ValueError("it names no service: redis+sentinel://host:port/SERVICE")
        one = parts._replace(path=f"/{database}").geturl()
        service = unquote(service)
    options: dict[str, Any] = dict(parse_url(one))
    if options.pop("connection_class", None) is SSLConnection:
        options["ssl"] = True
    if kind == "single":
        return RedisAddress(kind, (), "", options, {})
    for name in ("host", "port"):
        options.pop(name, None)
    if kind == "cluster" and options.pop("db", 0):
        raise ValueError("a Redis Cluster has no database numbers")
    own = {name: options.pop(name) for name in list(options) if name.startswith(SENTINEL_OPTION)}
    sentinel_options = {name.removeprefix(SENTINEL_OPTION): value for name, value in own.items()}
    if sentinel_options and kind != "sentinel":
        raise ValueError(f"{', '.join(own)} mean something with redis+sentinel:// only")
    shared = {name: value for name, value in options.items() if name.startswith("ssl")}
    hosts = tuple(_host_and_port(place, DEFAULT_PORTS[kind]) for place in places.split(","))
    return RedisAddress(kind, hosts, service, options, {**shared, **sentinel_options})


def _host_and_port(place: str, default_port: int) -> tuple[str, int]:
    parts = urlsplit(f"//{place}")
    if not parts.hostname:
        raise ValueError(f"{place!r} names no host")
    return parts.hostname, parts.port or default_port


class RedisServers:
    """Redis clients for one thread. Nothing is connected before it is used; a call fails within about
    `io_timeout_s`."""

    def __init__(self, url: str, io_timeout_s: float) -> None:
        """Makes clients that connect when they are used. Raises ConfigError for a `url` that can't be read."""
        self._address = address = parse_redis_url(url)
        self._options = {"socket_timeout": io_timeout_s, "socket_connect_timeout": io_timeout_s, **address.options}
        self._options["retry"] = Retry(NoBackoff(), 0)
        self._cluster: redis.RedisCluster | None = None
        self._client: redis.Redis | None = None
        if address.kind == "single":
            self._client = redis.Redis(**self._options)
        elif address.kind == "sentinel":
            own = {"socket_timeout": io_timeout_s, "socket_connect_timeout": io_timeout_s, **address.sentinel_options}
            sentinels = Sentinel(list(address.hosts), sentinel_kwargs=own, **self._options)
            self._client = sentinels.master_for(address.service)

    def client_for(self, key: str) -> redis.Redis:
        """A client of the server that has `key`. Keys of the same slot may be used in one transaction there."""
        if self._client is not None:
            return self._client
        if self._cluster is None:
            nodes = [ClusterNode(host, port) for host, port in self._address.hosts]
            self._cluster = redis.RedisCluster(startup_nodes=nodes, require_full_coverage=False, **self._options)
        node = self._cluster.get_node_from_key(key)
        if node is None:
            raise redis.exceptions.SlotNotCoveredError(f"no node of the Redis Cluster has the slot of {key}")
        return self._cluster.get_redis_connection(node)

    def disconnect(self) -> None:
        """Makes the next call connect anew and ask which server is in charge. For use after an error."""
        if self._client is not None:
            self._client.connection_pool.disconnect()
        elif self._cluster is not None:
            self._cluster.close()
            self._cluster = None

    def close(self) -> None:
        self.disconnect()
        if self._client is not None:
            self._client.close()


class AsyncRedisServers:
    """Redis clients for one event loop."""

    def __init__(self, url: str, io_timeout_s: float) -> None:
        """Makes clients that connect when they are used. Raises ConfigError for a `url` that can't be read."""
        self._address = address = parse_redis_url(url)
        timeouts = {"socket_timeout": io_timeout_s, "socket_connect_timeout": io_timeout_s}
        self._options: dict[str, Any] = {"health_check_interval": 10, **timeouts, **address.options}
        self._stream_client: aioredis.Redis | None = None
        self.client: Any  # for commands on one key; in a cluster it finds the key's server by itself
        if address.kind == "cluster":
            self.client = self._new_cluster()
            return
        self._options["retry"] = AsyncRetry(NoBackoff(), 0)
        if address.kind == "single":
            self.client = aioredis.Redis(**self._options)
        else:
            sentinels = AsyncSentinel(
                list(address.hosts), sentinel_kwargs={**timeouts, **address.sentinel_options}, **self._options
            )
            self.client = sentinels.master_for(address.service)

    def _new_cluster(self) -> aioredis.RedisCluster:
        nodes = [AsyncClusterNode(host, port) for host, port in self._address.hosts]
        return aioredis.RedisCluster(startup_nodes=nodes, require_full_coverage=False, **self._options)

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        if not keys:
            return []
        found: list[bytes | None]
        if self._address.kind == "cluster":
            found = await self.client.mget_nonatomic(keys)
        else:
            found = await self.client.mget(keys)
        return found

    async def stream(self) -> PubSub:
        """Opens a subscription on a connection of its own. A cluster passes on what is published at any of its
        servers."""
        if self._address.kind != "cluster":
            return self.client.pubsub()  # type: ignore[no-any-return]
        await self._drop_stream_client()
        await self.client.initialize()
        node = self.client.get_random_node()
        self._stream_client = aioredis.Redis(
            host=node.host, port=node.port, **self._options, retry=AsyncRetry(NoBackoff(), 0)
        )
        return self._stream_client.pubsub()

    async def reconnect(self) -> None:
        """Makes the next call ask which server is in charge. For use after an error."""
        if self._address.kind == "cluster":
            await self.aclose()
            self.client = self._new_cluster()

    async def _drop_stream_client(self) -> None:
        client, self._stream_client = self._stream_client, None
        if client is not None:
            await client.aclose()

    async def aclose(self) -> None:
        await self._drop_stream_client()
        await self.client.aclose()
