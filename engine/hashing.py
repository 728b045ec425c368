"""Block hashes: a chain of SHA-256 digests, 16 bytes each, over raw token buffers (docs/architecture.md).

`hash_i = SHA-256(hash_{i-1} || int32 little-endian token ids of block i || extra)[:16]`, started by `root_hash`. The
chain is made in units of `hash_block_size` tokens, equal in the whole cluster; a node whose blocks are k times as
large keeps every k-th hash, the one that closes its block. Equal in every process and on every machine.

A salted prompt starts at a root of its salt. If its leading blocks are public (docs/security.md), those are hashed
without the salt, and the first block after them follows `private_root` of the last public one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

HASH_BYTES = 16
TENANT_BYTES = 16  # of a salt: they name the tenant


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


def hash_blocks(
    token_ids: np.ndarray, block_size: int, root: bytes, parent: bytes | None = None, extra: bytes = b""
) -> list[bytes]:
    """Hashes of the full blocks of `token_ids`, int32 [num_tokens]; tokens of a last partial block are ignored.

    With `parent`, the tokens continue the chain after that hash; otherwise the chain starts at `root`. `extra` goes
    into every block (what changes KV besides the tokens). ValueError: `token_ids` is not one-dimensional int32.
    """
    if token_ids.ndim != 1 or token_ids.dtype != np.int32:
        raise ValueError(f"token_ids must be int32 [num_tokens], not {token_ids.dtype} {list(token_ids.shape)}")
    whole = np.ascontiguousarray(token_ids[: len(token_ids) // block_size * block_size], "<i4")
    blocks: list[bytes] = whole.view(f"V{4 * block_size}").tolist()
    sha256 = hashlib.sha256
    last = root if parent is None else parent
    if extra:
        return [last := sha256(last + block + extra).digest()[:HASH_BYTES] for block in blocks]
    return [last := sha256(last + block).digest()[:HASH_BYTES] for block in blocks]


@dataclass(frozen=True, slots=True)
class Secrecy:
    """Who may find the blocks of a prompt: whoever brings the same salt (b"": everybody), but of its first
    `num_public_tokens`, cut to whole hash blocks, everybody."""

    salt: bytes = b""
    num_public_tokens: int = 0


EVERYBODYS = Secrecy()


def hash_prompt(
    token_ids: np.ndarray,
    block_size: int,
    root_for_salt: Callable[[bytes], bytes],
    secrecy: Secrecy = EVERYBODYS,
    start: int = 0,
    parent: bytes | None = None,
) -> list[bytes]:
    """As `hash_blocks`, of a prompt's tokens from position `start` on; `parent` is the hash of the block before."""
    salt = secrecy.salt
    end_of_public = secrecy.num_public_tokens // block_size * block_size if salt else 0
    if start > end_of_public or not end_of_public:
        return hash_blocks(token_ids, block_size, root_for_salt(salt) if parent is None else parent)
    public = hash_blocks(token_ids[: end_of_public - start], block_size, root_for_salt(b""), parent)
    rest = token_ids[end_of_public - start :]
    if len(rest) < block_size:
        return public
    last = public[-1] if public else parent
    assert last is not None, "public tokens have a whole block"
    return public + hash_blocks(rest, block_size, private_root(last, salt))


class PromptHashes(Sequence[bytes]):
    """As `hash_prompt`, of the whole prompt; each hash is made when it, or one behind it, is asked for first.

    Whoever looks a prompt up stops where nobody holds any more of it, and the chain behind that need not be made.
    """

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
        self.made: list[bytes] = []

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, int):
            at = range(self._length)[index]
            self._make(at + 1)
            return self.made[at]
        start, stop, step = index.indices(self._length)
        assert step > 0, "made from the first on"
        self._make(stop)
        return self.made[start:stop:step]

    def _make(self, num_hashes: int) -> None:
        size, made = self._block_size, self.made
        if num_hashes <= len(made):
            return
        start, parent = len(made) * size, made[-1] if made else None
        tokens = self._token_ids[start : num_hashes * size]
        made += hash_prompt(tokens, size, self._root_for_salt, self._secrecy, start, parent)


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
        self._root_for_salt = root_for_salt

    def extend(self, hashes: list[bytes], token_ids: np.ndarray, secrecy: Secrecy) -> None:
        """Appends to `hashes` those of the full blocks in `token_ids`, int32: the tokens after the hashed ones."""
        if len(token_ids) < self.block_size:
            return
        start, parent = len(hashes) * self.block_size, hashes[-1] if hashes else None
        tokens = token_ids[: len(token_ids) // self.block_size * self.block_size]
        fine = hash_prompt(tokens, self._hash_block_size, self._root_for_salt, secrecy, start, parent)
        hashes += every_kth(fine, self.block_size // self._hash_block_size)

    def num_public_blocks(self, secrecy: Secrecy) -> int:
        return num_public_blocks(secrecy, self.block_size, self._hash_block_size)
