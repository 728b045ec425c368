"""Tenants: to whom the cached blocks of a pool belong, and how much of a cache each tenant may fill. Pure.

A tenant is known by the first 16 bytes of the salt that its requests carry (docs/security.md); b"" stands for
everybody: prompts without a salt, and public blocks. Everybody has no quota.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from tandem.engine.contracts.hashing import TENANT_BYTES

MAX_TENANTS = 65_536  # whose shares are remembered; a guess


def tenant_of_salt(salt: bytes) -> bytes:
    return salt[:TENANT_BYTES]


def tenant_of_block(index: int, num_public: int, salt: bytes) -> bytes:
    """The tenant of a prompt's block, when its first `num_public` blocks hold public tokens only
    (hashing.num_public_blocks)."""
    return b"" if index < num_public else tenant_of_salt(salt)


class TenantShares:
    """What share of each cache a tenant may fill, as routers said last. A tenant that was not heard of may fill all."""

    def __init__(self) -> None:
        self._shares: OrderedDict[bytes, float] = OrderedDict()

    def note(self, tenant: bytes, share: float) -> None:
        if not tenant:
            return
        self._shares.pop(tenant, None)
        if share < 1.0:
            self._shares[tenant] = max(0.0, share)
            if len(self._shares) > MAX_TENANTS:
                self._shares.popitem(last=False)

    def quota(self, tenant: bytes, capacity: int) -> int | None:
        """How many of `capacity` blocks the tenant may have cached; None: no limit."""
        share = self._shares.get(tenant)
        return None if share is None else int(share * capacity)


class TenantBlocks:
    """How many blocks of each tenant are cached, and those of them that nobody holds, the oldest first."""

    def __init__(self, shares: TenantShares, capacity: int) -> None:
        self._shares, self._capacity = shares, capacity
        self._num_cached: Counter[bytes] = Counter()
        self._free: dict[bytes, OrderedDict[int, None]] = {}

    def num_cached(self, tenant: bytes) -> int:
        return self._num_cached[tenant]

    def cached(self, tenant: bytes) -> None:
        """A block that somebody holds was put into the cache."""
        self._num_cached[tenant] += 1

    def forgotten(self, tenant: bytes, block_id: int) -> None:
        """A cached block, held or not, is no longer cached."""
        self._num_cached[tenant] -= 1
        self.held(tenant, block_id)
        if not self._num_cached[tenant]:
            del self._num_cached[tenant]

    def free(self, tenant: bytes, block_id: int) -> None:
        """Notes that nobody holds the cached block any more."""
        self._free.setdefault(tenant, OrderedDict())[block_id] = None

    def held(self, tenant: bytes, block_id: int) -> None:
        free = self._free.get(tenant)
        if free is not None:
            free.pop(block_id, None)
            if not free:
                del self._free[tenant]

    def excess(self, tenant: bytes) -> int | None:
        """The block that a tenant over its quota gives up next. None: it is within its quota, or all that it has
        cached is in use."""
        quota = self._shares.quota(tenant, self._capacity)
        if quota is None or self._num_cached[tenant] <= quota or tenant not in self._free:
            return None
        return next(iter(self._free[tenant]))

    def check_integrity(self, cached: Counter[bytes], free: dict[bytes, set[int]]) -> None:
        """Raises AssertionError unless the accounts are the pool's: per tenant, how many blocks are `cached`, and
        which of them are `free`."""
        assert self._num_cached == cached, "a tenant's cached blocks are miscounted"
        assert {tenant: set(blocks) for tenant, blocks in self._free.items()} == free
