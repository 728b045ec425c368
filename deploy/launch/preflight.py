"""What `tandem serve` checks before it starts a child: what would else be found wrong after weights are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.deploy.options import build
from tandem.engine.contracts.config import RouterOptions
from tandem.engine.contracts.errors import ConfigError
from tandem.engine.contracts.security import load_cluster_keys

REDIS_ANSWER_S = 3.0  # a guess: far above a round trip, short enough for people who wait for a start


def check_router(values: Mapping[str, Any]) -> None:
    """Checks that a router of these options could start: keys, secret, tokenizer, chat template, sampling defaults.
    Raises ConfigError."""
    from tandem.engine.contracts.generation_config import sampling_defaults
    from tandem.router.access.api_keys import ApiKeys
    from tandem.router.chat.chat import Chat
    from tandem.router.http.around import tls_settings
    from tandem.router.text.tokenizer import Tokenizer

    options = build(RouterOptions, values)
    tls_settings(options.web)
    ApiKeys.of(options, load_cluster_keys(options.cluster_secret_file, "127.0.0.1").tenant_salt)
    Chat(Path(options.model.model), Tokenizer(options.model.model), options)
    sampling_defaults(Path(options.model.model), options.generation_config)


def check_redis_url(url: str) -> None:
    """Checks that the URL of a Redis can be read. Raises ConfigError."""
    from tandem.kv_connector.directory.servers import parse_redis_url

    parse_redis_url(url)


def check_redis(url: str) -> None:
    """Checks that a Redis answers there now. Raises ConfigError."""
    import redis

    from tandem.kv_connector.directory.servers import RedisServers

    servers = RedisServers(url, REDIS_ANSWER_S)
    try:
        servers.client_for("tandem").ping()
    except (redis.RedisError, OSError) as error:
        raise ConfigError(
            f"no Redis answers at --redis-url ({error}): nodes find each other through it, so nothing would be served. "
            "Start it, correct the URL, or leave it out: `tandem serve` then starts a Redis of its own"
        ) from None
    finally:
        servers.close()
