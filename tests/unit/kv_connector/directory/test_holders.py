"""The compact table of holders against a plain dict of sets, and what an entry costs."""

from __future__ import annotations

import hashlib
import random
import tracemalloc

import pytest

from tandem.kv_connector.directory.holders import Holders, keys_of, keys_of_joined


def hash_of(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()[:16]


def walked(held: dict[int, dict[int, set[int]]], keys: list[int]) -> dict[int, int]:
    """By the definition: leading blocks that a column holds in any tier."""
    found = {}
    for column, tiers in held.items():
        everything = set().union(*tiers.values())
        length = next((index for index, key in enumerate(keys) if key not in everything), len(keys))
        if length:
            found[column] = length
    return found


@pytest.mark.parametrize("seed", range(4))
def test_any_history_answers_like_plain_sets(seed: int) -> None:
    rng = random.Random(seed)
    holders, held = Holders(), {}
    universe = keys_of([hash_of(number) for number in range(24)])
    for _ in range(600):
        move = rng.random()
        if move < 0.1 and len(held) < 7:
            held[holders.open_column()] = {0: set(), 1: set(), 2: set()}
        elif move < 0.15 and held:
            column = rng.choice(list(held))
            holders.close_column(column)
            del held[column]
        elif held:
            column, tier = rng.choice(list(held)), rng.randrange(3)
            keys = rng.sample(universe, rng.randrange(10))
            before = set().union(*held[column].values())
            if rng.random() < 0.6:
                room = rng.choice([100, 2])
                num_new = holders.add(column, tier, keys, room)
                new = [key for key in keys if key not in before][:room]
                assert num_new == len(new)
                held[column][tier] |= {key for key in keys if key in before} | set(new)
            else:
                num_gone = holders.remove(column, tier, keys)
                held[column][tier] -= set(keys)
                assert num_gone == len(before - set().union(*held[column].values()))
        holders.sweep(rng.randrange(1, 5))
        holders.check_integrity()
        prompt = universe[: rng.randrange(24)] if rng.random() < 0.5 else rng.sample(universe, 6)
        assert holders.prefixes(prompt) == walked(held, prompt)


def test_columns_are_used_again_once_their_bits_are_gone() -> None:
    holders = Holders()
    for turn in range(50):
        column = holders.open_column()
        holders.add(column, 0, range(turn * 10, turn * 10 + 10), 10)
        holders.close_column(column)
        holders.sweep(1000)
        assert len(holders) == 0
        assert column == 0


def test_an_entry_takes_less_than_100_bytes() -> None:
    """64 owners of 3,000 blocks each, one in eight of them on another owner too; the bound holds at every size, so
    also just after the dict has grown."""
    rng = random.Random(1)
    tracemalloc.start()
    try:
        holders = Holders()
        columns = [holders.open_column() for _ in range(64)]
        num_entries, worst = 0, 0.0
        for start in range(0, 192_000, 1000):
            joined = rng.randbytes(16 * 1000)
            column = columns[start // 3000]
            num_entries += holders.add(column, 0, keys_of_joined(joined), 1000)
            num_entries += holders.add(rng.choice(columns), 1, keys_of_joined(joined[: 16 * 125]), 1000)
            if num_entries > 20_000:
                worst = max(worst, tracemalloc.get_traced_memory()[0] / num_entries)
    finally:
        tracemalloc.stop()
    assert 40 < worst < 100


def test_torn_hashes_are_refused() -> None:
    with pytest.raises(ValueError, match="33 bytes"):
        keys_of_joined(bytes(33))
