"""The bodies of /v1/embeddings, /score and /rerank, and the texts that they ask about."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tandem.engine.contracts.errors import InvalidRequestError
from tandem.router.text.openai_api import LEAST_TIMEOUT_S, MAX_PROMPTS, CompletionBody

Texts = Annotated[list[str], Meta(min_length=1, max_length=MAX_PROMPTS)]
Pair = tuple[str, str]


class PoolingBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that all these bodies may have."""

    model: str | None = None
    user: str | None = None
    priority: Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)] | None = None
    request_id: Annotated[str, Meta(pattern="^[!-~]{1,256}$")] | None = None
    timeout: Annotated[float, Meta(ge=LEAST_TIMEOUT_S)] | None = None

    def as_completion(self) -> CompletionBody:
        """A completion that makes nothing: what retries, limits and placement go by."""
        shared = {name: getattr(self, name) for name in PoolingBody.__struct_fields__}
        return CompletionBody(**shared, prompt=msgspec.Raw(b""), max_tokens=1)


class EmbeddingsBody(PoolingBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/embeddings. `input` has the forms of a completion's `prompt`."""

    input: msgspec.Raw
    encoding_format: Literal["float", "base64"] | None = None
    embed_dtype: Literal["float32"] | None = None
    endianness: Literal["little", "native"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    add_special_tokens: bool | None = None


class ScoreBody(PoolingBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /score: one text against each of several others, or texts against their counterparts."""

    text_1: str | Texts
    text_2: str | Texts

    def pairs(self) -> list[Pair]:
        """The pairs of texts to be scored. Raises InvalidRequestError when the numbers of texts don't match."""
        first = [self.text_1] if isinstance(self.text_1, str) else self.text_1
        second = [self.text_2] if isinstance(self.text_2, str) else self.text_2
        if len(first) not in (1, len(second)):
            raise InvalidRequestError(
                f"text_1 has {len(first)} texts and text_2 {len(second)}: give one, or as many", param="text_1"
            )
        return list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))


class RerankBody(PoolingBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /rerank, as Jina's and Cohere's clients send it."""

    query: str
    documents: Texts
    top_n: Annotated[int, Meta(ge=0)] | None = None
    return_documents: bool | None = None

    def pairs(self) -> list[Pair]:
        return [(self.query, document) for document in self.documents]
