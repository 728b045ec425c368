"""Readers of bodies that ask a model which pools: each text, or pair of texts, is a prompt without output."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from tandem.engine.contracts.errors import InvalidRequestError
from tandem.engine.contracts.wire.parts import Task
from tandem.router.access.api_keys import Tenant
from tandem.router.http.asked import Asked, AskReader
from tandem.router.pooling.body import EmbeddingsBody, Pair, PoolingBody, RerankBody, ScoreBody
from tandem.router.pooling.format import Answer, PoolingFormat, embeddings, ranking, scores
from tandem.router.requests.service import CompletionService
from tandem.router.text.completion import ModelFacts, check_model, check_task, check_text
from tandem.router.text.openai_api import parse_prompts

Pairs = TypeVar("Pairs", ScoreBody, RerankBody)


def embeddings_reader(service: CompletionService) -> AskReader:
    async def read(raw: bytes, tenant: Tenant) -> Asked:
        body = service.bodies.read(EmbeddingsBody, raw)
        facts = await _facts(service, body, "embed")
        _check_dimensions(body.dimensions, facts)
        try:
            prompts = parse_prompts(body.input)
            ids = await service.encoder.encode(prompts, len(raw), facts, body.add_special_tokens is not False)
        except InvalidRequestError as error:
            raise _of("input", error) from error
        return _asked(service, "embd-", body, [(each, 0) for each in ids], "input", embeddings(body), tenant)

    return read


def score_reader(service: CompletionService) -> AskReader:
    return _pairs_reader(service, ScoreBody, "score-", "text_2", lambda _: scores)


def rerank_reader(service: CompletionService) -> AskReader:
    return _pairs_reader(service, RerankBody, "rerank-", "documents", ranking)


def _pairs_reader(
    service: CompletionService, body_kind: type[Pairs], kind: str, field: str, answer: Callable[[Pairs], Answer]
) -> AskReader:
    """A reader of bodies that ask about pairs of texts; `field` has the texts that errors name."""

    async def read(raw: bytes, tenant: Tenant) -> Asked:
        body = service.bodies.read(body_kind, raw)
        facts = await _facts(service, body, "score")
        encoded = await _encode_pairs(service, body.pairs(), len(raw), facts, field)
        return _asked(service, kind, body, encoded, field, answer(body), tenant)

    return read


def _check_dimensions(asked: int | None, facts: ModelFacts) -> None:
    whole, *cuts = facts.embedding_sizes
    if asked not in (None, whole) and (asked not in cuts if cuts else asked > whole):
        sizes = f"{', '.join(map(str, cuts))} or {whole}" if cuts else f"1 to {whole}"
        raise InvalidRequestError(f"dimensions is {asked}; vectors of this model may have {sizes}", param="dimensions")


async def _facts(service: CompletionService, body: PoolingBody, task: Task) -> ModelFacts:
    facts = await service.awaited_facts()
    check_model(body.model, facts)
    check_task(facts, task)
    return facts


async def _encode_pairs(
    service: CompletionService, pairs: Sequence[Pair], num_bytes: int, facts: ModelFacts, field: str
) -> list[tuple[list[int], int]]:
    def encode() -> list[tuple[list[int], int]]:
        for text in {text for pair in pairs for text in pair}:
            check_text(text, facts)
        return [service.tokenizer.encode_pair(*pair) for pair in pairs]

    try:
        return await service.encoder.apart(num_bytes, encode)
    except InvalidRequestError as error:
        raise _of(field, error) from error


def _asked(
    service: CompletionService,
    kind: str,
    body: PoolingBody,
    encoded: Sequence[tuple[list[int], int]],
    field: str,
    answer: Answer,
    tenant: Tenant,
) -> Asked:
    """What a body asks for. `encoded`: for each input its token ids, and where the second text of a pair begins."""
    facts, completion = service.facts(), body.as_completion()
    all_ids = [ids for ids, _ in encoded]
    for index, ids in enumerate(all_ids):
        if len(ids) > facts.max_input_len:
            problem = f"{field}[{index}] has {len(ids)} tokens; the model takes {facts.max_input_len}"
            raise InvalidRequestError(problem, param=field)
    try:
        plans = service.plan_prompts(completion, all_ids, all_ids, tenant)
    except InvalidRequestError as error:
        raise _of(field, error) from error
    plans = [replace(plan, pair_start=start) for plan, (_, start) in zip(plans, encoded, strict=True)]
    own = kind + uuid.uuid4().hex
    form = PoolingFormat(kind + body.request_id if body.request_id else own, facts.name, len(plans), answer)
    return Asked(own, completion, plans, form, form.pooled)


def _of(field: str, error: InvalidRequestError) -> InvalidRequestError:
    return type(error)(error.message, param=field if error.param == "prompt" else error.param)
