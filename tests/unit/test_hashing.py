"""Block hashes: known answers, chaining, and equality across processes."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import numpy as np
import pytest

from tandem.engine.hashing import BlockHasher, PromptHashes, Secrecy, every_kth, hash_blocks, hash_prompt, root_hash

TOKENS = np.arange(10, dtype=np.int32)


def test_known_answer() -> None:
    root = root_hash(b"identity", b"salt")
    assert root.hex() == "ed7e7de01559f1b1eb869eefdfba97e4"
    assert [h.hex() for h in hash_blocks(TOKENS, 4, root)] == [
        "53d9a07223c6a39649713096f1778328",
        "cc14b0fe5aabbf839e6666cb91197a0b",
    ]


def test_the_chain_follows_its_formula() -> None:
    root = root_hash(b"identity", b"")
    first = hashlib.sha256(root + TOKENS[:4].astype("<i4").tobytes() + b"x").digest()[:16]
    second = hashlib.sha256(first + TOKENS[4:8].astype("<i4").tobytes() + b"x").digest()[:16]
    assert hash_blocks(TOKENS, 4, root, extra=b"x") == [first, second]
    assert hash_blocks(TOKENS[4:], 4, b"unused", parent=first, extra=b"x") == [second]


def test_equal_in_another_process() -> None:
    code = (
        "import numpy as np; from tandem.engine.hashing import *;"
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
    assert hash_blocks(TOKENS, 4, root, extra=b"image")[0] != before[0]


def test_a_strided_view_hashes_as_its_copy() -> None:
    root = root_hash(b"i", b"")
    view = np.arange(20, dtype=np.int32)[::2]
    assert hash_blocks(view, 4, root) == hash_blocks(view.copy(), 4, root)


@pytest.mark.parametrize("bad", [np.arange(8), np.zeros((2, 4), np.int32)])
def test_other_arrays_are_refused(bad: np.ndarray) -> None:
    with pytest.raises(ValueError, match="int32"):
        hash_blocks(bad, 4, root_hash(b"", b""))


def test_hashes_grow_with_the_tokens_and_skip_to_the_block_size() -> None:
    tokens = np.arange(50, dtype=np.int32)
    hasher = BlockHasher(8, 4, lambda salt: root_hash(b"i", salt))
    whole: list[bytes] = []
    hasher.extend(whole, tokens, Secrecy(b"s"))
    assert whole == every_kth(hash_blocks(tokens, 4, root_hash(b"i", b"s")), 2)
    assert len(whole) == 6
    grown: list[bytes] = []
    for end in range(51):
        hasher.extend(grown, tokens[len(grown) * 8 : end], Secrecy(b"s"))
    assert grown == whole


def test_block_size_must_be_a_multiple() -> None:
    with pytest.raises(ValueError, match="multiple"):
        BlockHasher(12, 8, lambda salt: salt)


def root_for_salt(salt: bytes) -> bytes:
    return root_hash(b"identity", salt)


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


@pytest.mark.parametrize("num_public", [0, 4, 8, 12, 20, 28, 48, 50])
def test_a_node_continues_the_routers_chain_across_the_end_of_the_public_part(num_public: int) -> None:
    tokens, secrecy = np.arange(50, dtype=np.int32), Secrecy(b"s" * 16, num_public)
    hasher = BlockHasher(8, 4, root_for_salt)
    whole = every_kth(hash_prompt(tokens, 4, root_for_salt, secrecy), 2)
    grown: list[bytes] = []
    for end in range(51):
        hasher.extend(grown, tokens[len(grown) * 8 : end], secrecy)
    assert grown == whole
    shared = hasher.num_public_blocks(secrecy)
    assert shared == num_public // 8
    assert whole[:shared] == every_kth(hash_prompt(tokens, 4, root_for_salt), 2)[:shared]


def test_public_tokens_mean_nothing_without_a_salt() -> None:
    tokens = np.arange(20, dtype=np.int32)
    assert hash_prompt(tokens, 4, root_for_salt, Secrecy(b"", 8)) == hash_prompt(tokens, 4, root_for_salt)
    assert BlockHasher(4, 4, root_for_salt).num_public_blocks(Secrecy(b"", 8)) == 0


@pytest.mark.parametrize("secrecy", [Secrecy(), Secrecy(b"s" * 16), Secrecy(b"s" * 16, 8), Secrecy(b"s" * 16, 50)])
def test_hashes_that_are_made_when_asked_for_are_the_same(secrecy: Secrecy) -> None:
    tokens = np.arange(50, dtype=np.int32)
    whole = hash_prompt(tokens, 4, root_for_salt, secrecy)
    hashes = PromptHashes(tokens, 4, root_for_salt, secrecy)
    assert len(hashes) == 12
    assert hashes.made == []
    assert hashes[0] == whole[0]
    assert len(hashes.made) == 1
    assert hashes[1:3] == whole[1:3]
    assert hashes.made == whole[:3]
    assert hashes[2:9] == whole[2:9]
    assert hashes[9:9] == []
    assert len(hashes.made) == 9
    assert every_kth(hashes, 3) == whole[2::3]
    assert list(hashes) == whole
    assert hashes[-1] == whole[-1]
    with pytest.raises(IndexError):
        hashes[12]
