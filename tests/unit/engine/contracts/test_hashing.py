"""Block hashes: known answers, chaining, and equality across processes."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.contracts.hashing import (
    BLOCKS_PER_GROUP,
    BlockHasher,
    PromptHashes,
    Secrecy,
    every_kth,
    hash_blocks,
    hash_prompt,
    root_hash,
)

TOKENS = np.arange(10, dtype=np.int32)
KNOWN = ["53d9a07223c6a39649713096f1778328", "bb6d99c6455e3e33212468b21e089de3"]


def root_for_salt(salt: bytes) -> bytes:
    return root_hash(b"identity", salt)


def test_known_answer() -> None:
    root = root_hash(b"identity", b"salt")
    assert root.hex() == "ed7e7de01559f1b1eb869eefdfba97e4"
    assert [h.hex() for h in hash_blocks(TOKENS, 4, root)] == KNOWN


def test_a_group_follows_the_one_before_and_its_blocks_what_it_holds_so_far() -> None:
    root, tokens = root_hash(b"identity", b""), np.arange(4 * 20, dtype=np.int32)
    expected, before, size = [], root, 4 * 4
    raw = tokens.astype("<i4").tobytes()
    for block in range(20):
        start = block // BLOCKS_PER_GROUP * BLOCKS_PER_GROUP
        expected.append(hashlib.sha256(before + raw[start * size : (block + 1) * size]).digest()[:16])
        if (block + 1) % BLOCKS_PER_GROUP == 0:
            before = expected[-1]
    assert hash_blocks(tokens, 4, root) == expected


def test_equal_in_another_process() -> None:
    code = (
        "import numpy as np; from tandem.engine.contracts.hashing import *;"
        "print([h.hex() for h in hash_blocks(np.arange(10, dtype=np.int32), 4, root_hash(b'i', b's'))])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == str([h.hex() for h in hash_blocks(TOKENS, 4, root_hash(b"i", b"s"))])


@pytest.mark.parametrize(("num_tokens", "num_hashes"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2)])
def test_only_full_blocks_are_hashed(num_tokens: int, num_hashes: int) -> None:
    assert len(hash_blocks(TOKENS[:num_tokens], 4, root_hash(b"", b""))) == num_hashes


def test_a_hash_depends_on_everything_before_it() -> None:
    root = root_hash(b"i", b"")
    changed = TOKENS.copy()
    changed[0] += 1
    before, after = hash_blocks(TOKENS, 4, root), hash_blocks(changed, 4, root)
    assert all(a != b for a, b in zip(before, after, strict=True))
    assert hash_blocks(TOKENS, 4, root_hash(b"i", b"tenant"))[0] != before[0]


def test_a_strided_view_hashes_as_its_copy() -> None:
    root = root_hash(b"i", b"")
    view = np.arange(20, dtype=np.int32)[::2]
    assert hash_blocks(view, 4, root) == hash_blocks(view.copy(), 4, root)


@pytest.mark.parametrize("bad", [np.arange(8), np.zeros((2, 4), np.int32)])
def test_other_arrays_are_refused(bad: np.ndarray) -> None:
    with pytest.raises(ValueError, match="int32"):
        hash_blocks(bad, 4, root_hash(b"", b""))


@given(
    num_tokens=st.integers(0, 150),
    num_public=st.integers(0, 150),
    blocks_in_one=st.integers(1, 5),
    ends=st.lists(st.integers(0, 150), max_size=6).map(sorted),
)
def test_hashes_that_grow_with_the_tokens_are_those_of_the_whole(
    num_tokens: int, num_public: int, blocks_in_one: int, ends: list[int]
) -> None:
    tokens, secrecy = np.arange(num_tokens, dtype=np.int32), Secrecy(b"s" * 16, num_public)
    hasher = BlockHasher(2 * blocks_in_one, 2, root_for_salt)
    whole = every_kth(hash_prompt(tokens, 2, root_for_salt, secrecy), blocks_in_one)
    grown: list[bytes] = []
    for end in [*ends, num_tokens]:
        known = min(end, num_tokens)
        hasher.extend(grown, lambda start, known=known: tokens[start:known], secrecy, known)
    assert grown == whole
    shared = hasher.num_public_blocks(secrecy)
    assert shared == num_public // 2 // blocks_in_one
    assert whole[:shared] == every_kth(hash_prompt(tokens, 2, root_for_salt), blocks_in_one)[:shared]


def test_block_size_must_be_a_multiple() -> None:
    with pytest.raises(ValueError, match="multiple"):
        BlockHasher(12, 8, lambda salt: salt)


@pytest.mark.parametrize(("num_public", "num_shared"), [(0, 0), (3, 0), (4, 1), (11, 2), (12, 3), (100, 5)])
def test_salts_share_whole_public_blocks_and_nothing_after_them(num_public: int, num_shared: int) -> None:
    tokens = np.arange(22, dtype=np.int32)
    plain = hash_prompt(tokens, 4, root_for_salt)
    a, b, alone = (
        hash_prompt(tokens, 4, root_for_salt, Secrecy(*secrecy))
        for secrecy in ((b"a" * 16, num_public), (b"b" * 16, num_public), (b"a" * 16, 0))
    )
    assert plain == hash_blocks(tokens, 4, root_for_salt(b""))
    assert len(a) == len(b) == 5
    assert a[:num_shared] == b[:num_shared] == plain[:num_shared]
    private = [set(hashes[num_shared:]) for hashes in (plain, a, b)]
    assert not private[0] & private[1] | private[0] & private[2] | private[1] & private[2]
    assert num_shared == 0 or not set(a) & set(alone), "what follows a public prefix is another chain than without it"


@pytest.mark.parametrize("num_public", [0, 11])
def test_contexts_share_no_block_public_ones_included(num_public: int) -> None:
    tokens = np.arange(22, dtype=np.int32)
    chains = [
        hash_prompt(tokens, 4, root_for_salt, Secrecy(salt, num_public, context))
        for salt in (b"", b"a" * 16)
        for context in (b"", b"one", b"other")
    ]
    assert len({block for chain in chains for block in chain}) == 6 * 5 - 3 * (num_public // 4)
    for context in (b"one", b"other"):
        prompt = PromptHashes(tokens, 4, root_for_salt, Secrecy(b"a" * 16, num_public, context))
        assert list(prompt) == hash_prompt(tokens, 4, root_for_salt, Secrecy(b"a" * 16, num_public, context))


def test_public_tokens_mean_nothing_without_a_salt() -> None:
    tokens = np.arange(20, dtype=np.int32)
    assert hash_prompt(tokens, 4, root_for_salt, Secrecy(b"", 8)) == hash_prompt(tokens, 4, root_for_salt)
    assert BlockHasher(4, 4, root_for_salt).num_public_blocks(Secrecy(b"", 8)) == 0


@given(
    num_blocks=st.integers(0, 40),
    num_public=st.integers(0, 100),
    asked=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.sampled_from([1, 2, 3, 8])), max_size=6),
)
def test_hashes_that_are_made_when_asked_for_are_the_same(
    num_blocks: int, num_public: int, asked: list[tuple[int, int, int]]
) -> None:
    tokens, secrecy = np.arange(2 * num_blocks, dtype=np.int32), Secrecy(b"s" * 16, num_public, b"context")
    whole = hash_prompt(tokens, 2, root_for_salt, secrecy)
    hashes = PromptHashes(tokens, 2, root_for_salt, secrecy)
    assert len(hashes) == len(whole) == num_blocks
    for start, stop, step in asked:
        assert hashes[start:stop:step] == whole[start:stop:step]
        assert [hashes[end] for end in range(7, num_blocks, 8)] == whole[7::8]
    assert list(hashes) == whole
    with pytest.raises(IndexError):
        hashes[num_blocks]
