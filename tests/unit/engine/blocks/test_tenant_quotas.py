"""Whose the cached blocks are: a tenant beyond its share gives up its own, never another's and none in use."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.contracts.tenants import MAX_TENANTS, TenantShares, tenant_of_salt

ACME, GLOBEX, PUBLIC = b"a" * 16, b"g" * 16, b""


def name(tenant: bytes, index: int) -> bytes:
    return (tenant or b"public")[:6].ljust(8) + index.to_bytes(8, "little")


def chain(pool: BlockPool, tenant: bytes, length: int, first: int = 0) -> list[int]:
    """Registered blocks of one prompt, held."""
    blocks = pool.allocate(length)
    assert blocks is not None
    for i, block_id in enumerate(blocks):
        parent = name(tenant, first + i - 1) if i else None
        pool.register(block_id, name(tenant, first + i), parent, tenant=tenant)
    return blocks


def cached(pool: BlockPool, tenant: bytes, first: int, length: int) -> int:
    return len(pool.match_prefix([name(tenant, first + i) for i in range(length)]))


def test_a_tenant_over_its_share_loses_its_own_oldest_blocks() -> None:
    pool = BlockPool(16, True)
    pool.shares.note(ACME, 0.25)
    others = chain(pool, GLOBEX, 6)
    pool.free(others, None)
    for first in (0, 100):
        pool.free(chain(pool, ACME, 3, first), None)
        pool.check_integrity()
    assert cached(pool, ACME, 100, 3) == 3, "the newest stay"
    assert cached(pool, ACME, 0, 3) == 1, "of an old chain the parents stay longest"
    assert cached(pool, GLOBEX, 0, 6) == 6, "nobody else pays"
    assert pool.num_free == 16


def test_blocks_in_use_are_kept_and_given_up_when_they_are_free() -> None:
    pool = BlockPool(8, True)
    pool.shares.note(ACME, 0.25)
    blocks = chain(pool, ACME, 5)
    assert cached(pool, ACME, 0, 5) == 5
    pool.free(blocks, None)
    assert cached(pool, ACME, 0, 5) == 2
    pool.check_integrity()


def test_a_hit_makes_blocks_young_again() -> None:
    pool = BlockPool(8, True)
    pool.shares.note(ACME, 0.5)
    for first in (0, 100):
        pool.free(chain(pool, ACME, 2, first), None)
    again = pool.match_prefix([name(ACME, 0), name(ACME, 1)])
    pool.touch(again)
    pool.free(again, None)
    pool.free(chain(pool, ACME, 2, 200), None)
    assert [cached(pool, ACME, first, 2) for first in (0, 100, 200)] == [2, 0, 2]


def test_public_blocks_and_tenants_without_a_share_have_no_quota() -> None:
    pool = BlockPool(8, True)
    pool.shares.note(PUBLIC, 0.0)
    pool.free(chain(pool, PUBLIC, 4), None)
    pool.free(chain(pool, GLOBEX, 4), None)
    assert cached(pool, PUBLIC, 0, 4) == cached(pool, GLOBEX, 0, 4) == 4


def test_a_share_of_nothing_keeps_nothing_and_a_full_one_lifts_the_quota() -> None:
    pool = BlockPool(4, True)
    pool.shares.note(ACME, 0.0)
    pool.free(chain(pool, ACME, 2), None)
    assert pool.num_cached == 0
    pool.shares.note(ACME, 1.0)
    pool.free(chain(pool, ACME, 2), None)
    assert pool.num_cached == 2


def test_giving_up_is_published_children_first() -> None:
    pool = BlockPool(8, True)
    pool.shares.note(ACME, 0.125)
    blocks = chain(pool, ACME, 3)
    pool.drain_events()
    pool.free(blocks, None)
    assert [(event.block_hash, event.stored) for event in pool.drain_events()] == [
        (name(ACME, 2), False),
        (name(ACME, 1), False),
    ]


def test_a_tenant_is_the_first_part_of_a_salt() -> None:
    assert tenant_of_salt(b"") == b""
    assert tenant_of_salt(ACME) == tenant_of_salt(ACME + b"of one user") == ACME


def test_shares_of_many_tenants_are_bounded() -> None:
    shares = TenantShares()
    for number in range(MAX_TENANTS + 10):
        shares.note(number.to_bytes(16, "little"), 0.5)
    assert shares.quota((0).to_bytes(16, "little"), 100) is None
    assert shares.quota((MAX_TENANTS + 9).to_bytes(16, "little"), 100) == 50
    assert len(shares._shares) == MAX_TENANTS


@pytest.mark.parametrize("seed", range(20))
def test_random_tenants_stay_within_their_shares(seed: int) -> None:
    rng = random.Random(seed)
    pool = BlockPool(rng.randint(4, 24), True)
    quotas = {ACME: rng.random(), GLOBEX: rng.random()}
    for tenant, share in quotas.items():
        pool.shares.note(tenant, share)
    held: list[list[int]] = []
    for _ in range(300):
        if held and rng.random() < 0.5:
            pool.free(held.pop(rng.randrange(len(held))), None)
        else:
            tenant, first, length = rng.choice([ACME, GLOBEX, PUBLIC]), 100 * rng.randint(0, 3), rng.randint(1, 6)
            hits = pool.match_prefix([name(tenant, first + i) for i in range(length)])
            pool.touch(hits)
            new = pool.allocate(length - len(hits))
            if new is None:
                pool.free(hits, None)
                continue
            for i, block_id in enumerate(new, len(hits)):
                pool.register(
                    block_id, name(tenant, first + i), name(tenant, first + i - 1) if i else None, None, tenant
                )
            held.append(hits + new)
        pool.drain_events()
        pool.check_integrity()
        counts = Counter(pool.tenant(block_hash) for block_hash in pool.cached_hashes())
        for tenant, share in quotas.items():
            in_use = sum(
                pool.ref_count(block) > 0
                for block_hash in pool.cached_hashes()
                if pool.tenant(block_hash) == tenant and (block := pool.find(block_hash)) is not None
            )
            assert counts[tenant] <= max(int(share * pool.num_blocks), in_use)
