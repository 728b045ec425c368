"""Routes about the served model: its card, and its tokenizer."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response

from tandem.engine.contracts.errors import InvalidRequestError
from tandem.router.access.gate import Gate
from tandem.router.chat.chat import Chat
from tandem.router.chat.chat_body import ChatTokenizeBody, parse_tokenize
from tandem.router.http.http_io import read_body
from tandem.router.media.parts import ReadMedia
from tandem.router.requests.service import CompletionService
from tandem.router.text.completion import ModelFacts, check_model, check_text, with_placeholders
from tandem.router.text.openai_api import DetokenizeBody, TokenizeBody

READ = ["GET", "HEAD"]


def json_answer(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def add_model_routes(app: FastAPI, service: CompletionService, gate: Gate, created: int) -> None:
    async def cards() -> dict[str, dict[str, Any]]:
        facts = await service.awaited_facts()
        models = {name: card(facts, name, facts.name, None) for name in facts.names}
        adapters = service.cluster.adapters.all()
        return {**models, **{name: card(facts, name, adapters[name], facts.name) for name in sorted(adapters)}}

    def card(facts: ModelFacts, name: str, root: str, parent: str | None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "tandem",
            "root": root,
            "parent": parent,
            "max_model_len": facts.max_input_len,
            "task": facts.task,
            "permission": [],
        }

    @app.api_route("/v1/models", methods=READ)
    async def list_models(request: Request) -> Response:
        gate.check(request.headers.raw)
        return json_answer({"object": "list", "data": [*(await cards()).values()]})

    @app.api_route("/v1/models/{model_id:path}", methods=READ)
    async def get_model(model_id: str, request: Request) -> Response:
        gate.check(request.headers.raw)
        found = (await cards()).get(model_id)
        if found is None:
            check_model(model_id, service.facts())
        return json_answer(found)


def _ids_of(
    service: CompletionService,
    chat: Chat,
    body: TokenizeBody | ChatTokenizeBody,
    facts: ModelFacts,
    media: ReadMedia | None,
) -> list[int]:
    if isinstance(body, ChatTokenizeBody):
        prompt = chat.prompt(body, facts, media)
        return with_placeholders(prompt.token_ids, prompt.media)
    check_text(body.prompt, facts)
    return service.tokenizer.encode(body.prompt, body.add_special_tokens)


def add_tokenizer_routes(app: FastAPI, service: CompletionService, gate: Gate, chat: Chat) -> None:
    limit = service.options.max_body_bytes

    if service.options.enable_tokenizer_info_endpoint:

        @app.api_route("/tokenizer_info", methods=READ)
        async def tokenizer_info(request: Request) -> Response:
            gate.check(request.headers.raw)
            return json_answer(chat.tokenizer_info)

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        gate.check(request.headers.raw)
        body = parse_tokenize(service.bodies, raw := await read_body(request.scope, request.receive, limit))
        facts = await service.awaited_facts()
        service.adapter_of(body.model, facts)
        media = await service.media.read(body.messages, facts) if isinstance(body, ChatTokenizeBody) else None

        def answer() -> Response:
            ids = _ids_of(service, chat, body, facts, media)
            strings = [service.tokenizer.token_string(i) for i in ids] if body.return_token_strs else None
            count = {"count": len(ids), "max_model_len": facts.max_input_len}
            return json_answer({**count, "tokens": ids, "token_strs": strings})

        return await service.encoder.apart(len(raw), answer)

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        gate.check(request.headers.raw)
        body = service.bodies.read(DetokenizeBody, raw := await read_body(request.scope, request.receive, limit))
        facts = await service.awaited_facts()
        service.adapter_of(body.model, facts)
        if max(body.tokens, default=0) >= facts.vocab_size:
            raise InvalidRequestError(f"tokens holds ids beyond {facts.vocab_size - 1}", param="tokens")
        text = await service.encoder.apart(
            len(raw), lambda: service.tokenizer.decode(body.tokens, skip_special_tokens=False)
        )
        return json_answer({"prompt": text})
