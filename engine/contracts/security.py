"""Keys from the one cluster secret: ZMQ CURVE key pairs and signatures of grants.

Whoever holds the cluster secret is trusted with all KV (docs/security.md). Without a secret, control sockets are
plain and may only bind to loopback; grants are then signed with a fixed key, which keeps the checks running.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import os
from dataclasses import dataclass

import msgspec

from tandem.engine.contracts.errors import ConfigError, GrantError
from tandem.engine.contracts.hashing import TENANT_BYTES
from tandem.engine.contracts.wire.handoff import KVGrant

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ClusterKeys:
    """The cluster's secret, and whether control sockets use CURVE: not on loopback without a secret."""

    secret: bytes
    curve: bool

    def derive(self, purpose: str) -> bytes:
        """32 bytes for one purpose (HMAC-SHA256 as the KDF, RFC 5869's expand with a single block)."""
        return hmac.new(self.secret, b"tandem/" + purpose.encode() + b"\x01", hashlib.sha256).digest()

    def tenant_salt(self, tenant: str) -> bytes:
        """16 bytes for the block hashes of one tenant, equal in every router of the cluster."""
        return self.derive("tenant/" + tenant)[:TENANT_BYTES]

    def sign_grant(self, grant: KVGrant) -> KVGrant:
        return msgspec.structs.replace(grant, signature=self._signature(grant))

    def check_grant(self, grant: KVGrant) -> None:
        """Raises GrantError when the grant was not made by a holder of the cluster secret or was altered."""
        if not hmac.compare_digest(grant.signature, self._signature(grant)):
            raise GrantError(
                f"grant {grant.grant_id:#x} carries a wrong signature: forged, altered, or from another cluster",
                request_id=grant.request_id,
            )

    def _signature(self, grant: KVGrant) -> bytes:
        unsigned = msgspec.msgpack.encode(msgspec.structs.replace(grant, signature=b""))
        return hmac.new(self.derive("grant"), unsigned, hashlib.sha256).digest()[:16]

    def curve_keypair(self, side: str) -> tuple[bytes, bytes]:
        """(public, secret) in Z85 for "server" or "client"; all processes of a cluster share the two pairs."""
        import zmq
        import zmq.utils.z85

        secret = zmq.utils.z85.encode(self.derive("curve/" + side))
        return zmq.curve_public(secret), secret


def load_cluster_keys(secret_file: str, bind_host: str) -> ClusterKeys:
    """Reads the secret; raises ConfigError when there is none and `bind_host` is reachable from other machines."""
    if secret_file:
        try:
            with open(secret_file, "rb") as file:
                secret, mode = file.read().strip(), os.fstat(file.fileno()).st_mode
        except OSError as error:
            raise ConfigError(f"can't read the cluster secret {secret_file}: {error.strerror}") from error
        if len(secret) < 16:
            raise ConfigError(f"the cluster secret in {secret_file} is shorter than 16 bytes: `openssl rand -hex 32`")
        if mode & 0o077:  # not refused: secrets that an orchestrator mounts can't always be narrower
            logger.warning(
                "the cluster secret %s can be read or changed by other users of this machine (mode %o): "
                "chmod 600, unless only trusted users are here", secret_file, mode & 0o777,
            )  # fmt: skip
        return ClusterKeys(secret, curve=True)
    if not _is_loopback(bind_host):
        raise ConfigError(f"binding to {bind_host} needs --cluster-secret-file; without one only loopback is allowed")
    return ClusterKeys(b"loopback only", curve=False)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
