"""The model that a router process serves: its identity, the facts that requests are checked by, hashes of prompts."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tandem.engine.contracts.hashing import PromptHashes, Secrecy, root_hash
from tandem.engine.contracts.kv_layout import ModelIdentity
from tandem.engine.contracts.wire.parts import NodeInfo
from tandem.router.placing.readiness import difference, other_tokenizer
from tandem.router.text.completion import ModelFacts


class ServedModel:
    """The model of the first node that has the router's tokenizer. It is another one only when no node of this one is
    left."""

    def __init__(self, given_names: Sequence[str], tokenizer: str) -> None:
        """`given_names`: what clients call it; none: as its nodes do. `tokenizer`: the digest of the router's own."""
        self._given_names, self._tokenizer = given_names, tokenizer
        self._key = b""
        self.identity: ModelIdentity | None = None
        self.facts: ModelFacts | None = None

    def may_be(self, info: NodeInfo) -> bool:
        """Whether this node's model is of the tokenizer that makes prompts here."""
        return not other_tokenizer(self._tokenizer, info.identity)

    def difference(self, info: NodeInfo) -> str:
        """Why nothing is sent to a node that is connected, for people; "" when it serves."""
        return other_tokenizer(self._tokenizer, info.identity) or difference(self.identity, info.identity)

    def serve(self, info: NodeInfo) -> None:
        """Makes this node's model the one that is served."""
        self.identity = info.identity
        self._key = info.identity.key() if info.identity is not None else b""

    def update(self, infos: Sequence[NodeInfo]) -> None:
        """Takes the facts of the nodes that serve it. With none left the last facts stay, so that requests can be
        checked while they wait for one."""
        if infos:
            name, *aliases = self._given_names or (infos[0].model_name,)
            kinds = set(infos[0].media_kinds).intersection(*(info.media_kinds for info in infos))
            self.facts = ModelFacts(
                name,
                min(info.max_model_len for info in infos),
                min(info.vocab_size for info in infos),
                infos[0].task,
                infos[0].encoder,
                tuple(sorted(kinds)),
                infos[0].embedding_sizes,
                tuple(aliases),
            )

    def hash_prompt(self, token_ids: npt.NDArray[np.int32], secrecy: Secrecy) -> PromptHashes:
        """The hashes of a prompt, int32 [num_tokens], made only as far as placing asks for them."""
        if self.identity is None:
            return PromptHashes(token_ids[:0], 1, self._root_for_salt)
        return PromptHashes(token_ids, self.identity.hash_block_size, self._root_for_salt, secrecy)

    def _root_for_salt(self, salt: bytes) -> bytes:
        return _root(self._key, salt)


_root = functools.lru_cache(maxsize=4096)(root_hash)
