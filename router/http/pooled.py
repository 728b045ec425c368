"""Readers of bodies that ask a model which pools: each text, or pair of texts, is a prompt without output."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace

from tandem.engine.contracts.errors import InvalidRequestError
from tandem.engine.contracts.wire.parts import Task
from tandem.router.access.api_keys import Tenant
from tandem.router.http.asked import Asked, AskReader
from tandem.router.pooling.body import EmbeddingsBody, Pair, PoolingBody, RerankBody, ScoreBody
from tandem.router.pooling.format import Answer, PoolingFormat, embeddings, ranking, scores
from tandem.router.requests.service import CompletionService
from tandem.router.text.completion import ModelFacts, check_model, check_task, check_text
from tandem.router.text.openai_api import parse_prompts


def embeddings_reader(service: CompletionService) -> AskReader:
    async def read(raw: bytes, tenant: Tenant) -> Asked:
        body = service.bodies.read(EmbeddingsBody, raw)
        facts = await _facts(service, body, "embed")
        if body.dimensions is not None:
            raise InvalidRequestError("dimensions is not supported: vectors come whole; cut them", param="dimensions")
        try:
            prompts = parse_prompts(body.input)
            ids = await service.encoder.encode(prompts, len(raw), facts, body.add_special_tokens is not False)
        except InvalidRequestError as error:
            raise _of("input", error) from error
        return _asked(service, "embd-", body, [(each, 0) for each in ids], "input", embeddings(body), tenant)

    return read


def score_reader(service: CompletionService) -> AskReader:
    async def read(raw: bytes, tenant: Tenant) -> Asked:
        body = service.bodies.read(ScoreBody, raw)
        facts = await _facts(service, body, "score")
        encoded = await _encode_pairs(service, body.pairs(), len(raw), facts, "text_2")
        return _asked(service, "score-", body, encoded, "text_2", scores, tenant)

    return read


def rerank_reader(service: CompletionService) -> AskReader:
    async def read(raw: bytes, tenant: Tenant) -> Asked:
        body = service.bodies.read(RerankBody, raw)
        facts = await _facts(service, body, "score")
        encoded = await _encode_pairs(service, body.pairs(), len(raw), facts, "documents")
        return _asked(service, "rerank-", body, encoded, "documents", ranking(body), tenant)

    return read


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
