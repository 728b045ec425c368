"""Block hashes: a chain of SHA-256 digests, 16 bytes each, over raw token buffers (docs/directory.md).

Blocks of `hash_block_size` tokens, equal in the whole cluster, stand in groups of eight:
`hash_i = SHA-256(hash of the block before the group || int32 little-endian token ids of the group up to block i)[:16]`,
and the first group follows `root_hash`. So every block has its hash, and whoever needs only those of the groups' ends,
like a router that finds out how far a prompt is cached, makes an eighth of them. A node whose blocks are k times as
large keeps every k-th hash, the one that closes its block. Hashes are equal in every process and on every machine.

A salted prompt starts at a root of its salt. If its leading blocks are public (docs/security.md), those are hashed
without the salt; the first block after them follows `private_root` of the last public one, and where the next group
begins stays as it was. Where more than the tokens decides the KV (an adapter of the weights, say), a digest of it, the
context, is mixed into the root, so everything above is said of one context.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

HASH_BYTES = 16
BLOCKS_PER_GROUP = 8  # docs/measurements.md#the-time-of-a-placement
INT32 = np.dtype("<i4")
# Copying this object is faster than making a new one, which looks the algorithm up in OpenSSL's tables.
_NEW = hashlib.sha256()
TENANT_BYTES = 16  # the first bytes of a salt, which name the tenant


def root_hash(identity_key: bytes, salt: bytes) -> bytes:
    """Start of every chain of one (model identity, tenant salt), 16 bytes.

    `identity_key` must be self-delimiting (`ModelIdentity.key` is), so that no salt can imitate another identity.
    """
    return hashlib.sha256(identity_key + salt).digest()[:HASH_BYTES]


def private_root(public_hash: bytes, salt: bytes) -> bytes:
    """What the first private block of a chain follows, in place of `public_hash`, the hash of the block before it.

    The tag's length keeps it apart from the hash of any block: those are of 16 bytes and a multiple of 4.
    """
    return hashlib.sha256(b"private" + public_hash + salt).digest()[:HASH_BYTES]


def context_root(root: bytes, context: bytes) -> bytes:
    """What a chain starts at in place of `root` when `context` decides its KV beside the tokens; b"" decides nothing.

    Tag and lengths keep it apart from `private_root` and from the hash of any block.
    """
    return hashlib.sha256(b"context" + root + context).digest()[:HASH_BYTES] if context else root


def hash_blocks(token_ids: np.ndarray, block_size: int, before: bytes, num_in_group: int = 0) -> list[bytes]:
    """Hashes of the full blocks of `token_ids`, int32 [num_tokens]; tokens of a last partial block are ignored.

    `before`: the root, or the hash that their group follows; `num_in_group`: how many blocks stand in that group
    before them and count no more (the salt began to count after them).
    ValueError: `token_ids` is not one-dimensional int32.
    """
    raw, size = _raw(token_ids), 4 * block_size
    hashes: list[bytes] = []
    start, end, last = 0, (BLOCKS_PER_GROUP - num_in_group) * size, len(raw) // size * size
    while start < last:
        group = _NEW.copy()
        group.update(before)
        for at in range(start, min(end, last), size):
            group.update(raw[at : at + size])
            hashes.append(group.digest()[:HASH_BYTES])
        before = hashes[-1]
        start, end = end, end + BLOCKS_PER_GROUP * size
    return hashes


def _raw(token_ids: np.ndarray) -> bytes:
    if token_ids.dtype != INT32 or token_ids.ndim != 1:
        raise ValueError(f"token_ids must be int32 [num_tokens], not {token_ids.dtype} {list(token_ids.shape)}")
    return token_ids.tobytes()


@dataclass(frozen=True, slots=True)
class Secrecy:
    """Who may find the blocks of a prompt: whoever brings the same `salt` (b"": everybody). Everybody may find those of
    its first `num_public_tokens` tokens, rounded down to whole hash blocks. `context`: a digest of what decides the KV
    beside the tokens; no block of one context is ever one of another, public or not."""

    salt: bytes = b""
    num_public_tokens: int = 0
    context: bytes = b""


EVERYBODYS = Secrecy()


def hash_prompt(
    token_ids: np.ndarray,
    block_size: int,
    root_for_salt: Callable[[bytes], bytes],
    secrecy: Secrecy = EVERYBODYS,
    start: int = 0,
    parent: bytes | None = None,
) -> list[bytes]:
    """Hashes of the full blocks of int32 `token_ids` [num_tokens], 16 bytes each. They are the prompt's tokens from
    position `start` on, where a group must begin; `parent` is the hash of the block before, None at the start."""
    salt = secrecy.salt

    def root(salt: bytes) -> bytes:
        return context_root(root_for_salt(salt), secrecy.context)

    end_of_public = secrecy.num_public_tokens // block_size * block_size if salt else 0
    if start > end_of_public or not end_of_public:
        return hash_blocks(token_ids, block_size, root(salt) if parent is None else parent)
    public = hash_blocks(token_ids[: end_of_public - start], block_size, parent or root(b""))
    rest = token_ids[end_of_public - start :]
    if len(rest) < block_size:
        return public
    last = public[-1] if public else parent
    assert last is not None, "public tokens have a whole block"
    return public + hash_blocks(
        rest, block_size, private_root(last, salt), end_of_public // block_size % BLOCKS_PER_GROUP
    )


class PromptHashes(Sequence[bytes]):
    """The hashes that `hash_prompt` makes of a whole prompt, each made when it is asked for. The hash of a group's last
    block is made without those of the group's other blocks.

    A search for cached blocks stops where nobody holds any more of the prompt, so the hashes after that are never made.
    """

    __slots__ = ("_block_size", "_ends", "_first", "_length", "_root_for_salt", "_secrecy", "_token_ids")

    def __init__(
        self,
        token_ids: np.ndarray,
        block_size: int,
        root_for_salt: Callable[[bytes], bytes],
        secrecy: Secrecy = EVERYBODYS,
    ) -> None:
        self._token_ids, self._block_size = token_ids, block_size
        self._root_for_salt, self._secrecy = root_for_salt, secrecy
        self._length = len(token_ids) // block_size
        self._first: list[bytes] = []  # of the first blocks, as many as were asked for without a gap
        self._ends: list[bytes] = []  # of the first groups

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if index == 0 and self._length and not self._first:  # all that is asked of most prompts: few steps
            self._first = hash_prompt(
                self._token_ids[: self._block_size], self._block_size, self._root_for_salt, self._secrecy
            )
            return self._first[0]
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            assert step > 0, "made from the first on"
            group, within = divmod(start, BLOCKS_PER_GROUP)
            return self._from(group, stop)[within::step]
        group, within = divmod(range(self._length)[index], BLOCKS_PER_GROUP)
        if within == BLOCKS_PER_GROUP - 1:
            return self._end_of(group)
        return self._from(group, group * BLOCKS_PER_GROUP + within + 1)[within]

    def _end_of(self, group: int) -> bytes:
        """The hash of the last block of `group`. Most of a router's hashing happens here, so it makes few calls."""
        ends, size, secrecy = self._ends, self._block_size * BLOCKS_PER_GROUP, self._secrecy
        turns_private = -1  # the group in which the salt begins to count
        if secrecy.salt and secrecy.num_public_tokens >= self._block_size:
            turns_private = secrecy.num_public_tokens // size
        for at in range(len(ends), group + 1):
            if at in (0, turns_private):
                ends.append(self._from(at, (at + 1) * BLOCKS_PER_GROUP)[-1])
            else:
                state = _NEW.copy()
                state.update(ends[-1] + self._token_ids[at * size : (at + 1) * size].tobytes())
                ends.append(state.digest()[:HASH_BYTES])
        return ends[group]

    def _from(self, group: int, stop: int) -> list[bytes]:
        """Hashes of the blocks from the beginning of `group` to before `stop`."""
        if group:
            return self._hash(group, stop, self._end_of(group - 1))
        if stop > len(self._first):
            self._first = self._hash(0, stop, None)
        return self._first[:stop]

    def _hash(self, group: int, stop: int, parent: bytes | None) -> list[bytes]:
        size, start = self._block_size, group * BLOCKS_PER_GROUP * self._block_size
        return hash_prompt(
            self._token_ids[start : stop * size], size, self._root_for_salt, self._secrecy, start, parent
        )


def every_kth(hashes: Sequence[bytes], k: int) -> list[bytes]:
    """Hashes of blocks of k * hash_block_size tokens, out of those of hash_block_size tokens."""
    return list(hashes[k - 1 :: k])


def num_public_blocks(secrecy: Secrecy, block_size: int, hash_block_size: int) -> int:
    """Leading blocks of a salted prompt that hold public tokens only."""
    whole = secrecy.num_public_tokens // hash_block_size * hash_block_size
    return whole // block_size if secrecy.salt else 0


class BlockHasher:
    """Makes the hashes of a node's blocks, and continues them as tokens are generated.

    ValueError: `block_size` is not a multiple of `hash_block_size`.
    """

    def __init__(self, block_size: int, hash_block_size: int, root_for_salt: Callable[[bytes], bytes]) -> None:
        if hash_block_size < 1 or block_size % hash_block_size:
            raise ValueError(
                f"block_size {block_size} is not a multiple of hash_block_size {hash_block_size}; change one of them"
            )
        self.block_size = block_size
        self._hash_block_size = hash_block_size
        self._num_fine = block_size // hash_block_size
        # After so many blocks a block ends where a group of hashes does, and hashing can go on from there.
        self._blocks_per_turn = math.lcm(self._num_fine, BLOCKS_PER_GROUP) // self._num_fine
        self._root_for_salt = root_for_salt

    def extend(
        self, hashes: list[bytes], tokens_from: Callable[[int], np.ndarray], secrecy: Secrecy, num_tokens: int
    ) -> None:
        """Appends to `hashes` those of the further full blocks among the first `num_tokens` tokens.
        `tokens_from(start)`: the tokens from a position on, int32; it is asked from where a group begins."""
        num_known, size = len(hashes), self.block_size
        if num_tokens // size <= num_known:
            return
        first = num_known // self._blocks_per_turn * self._blocks_per_turn
        start, parent = first * size, hashes[first - 1] if first else None
        tokens = tokens_from(start)[: num_tokens // size * size - start]
        fine = hash_prompt(tokens, self._hash_block_size, self._root_for_salt, secrecy, start, parent)
        hashes += every_kth(fine, self._num_fine)[num_known - first :]

    def num_public_blocks(self, secrecy: Secrecy) -> int:
        return num_public_blocks(secrecy, self.block_size, self._hash_block_size)
