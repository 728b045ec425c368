"""Block hashes: known answers, chaining, and equality across processes."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import numpy as np
import pytest

from tandem.engine.hashing import BlockHasher, every_kth, hash_blocks, root_hash

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
    hasher.extend(whole, tokens, b"s")
    assert whole == every_kth(hash_blocks(tokens, 4, root_hash(b"i", b"s")), 2)
    assert len(whole) == 6
    grown: list[bytes] = []
    for end in range(51):
        hasher.extend(grown, tokens[len(grown) * 8 : end], b"s")
    assert grown == whole


def test_block_size_must_be_a_multiple() -> None:
    with pytest.raises(ValueError, match="multiple"):
        BlockHasher(12, 8, lambda salt: salt)
