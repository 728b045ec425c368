"""What a body asks for, by whichever path it came: a completion to be made, and how its answer is written."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from tandem.engine.contracts.errors import InvalidRequestError
from tandem.router.chat.chat import Chat
from tandem.router.chat.chat_body import parse_chat
from tandem.router.http.chat_responses import ChatFormat
from tandem.router.http.responses import AnswerFormat, CompletionFormat
from tandem.router.requests.service import CompletionService
from tandem.router.text.api_keys import Tenant
from tandem.router.text.completion import PromptPlan, check_model
from tandem.router.text.openai_api import CompletionBody


@dataclass(frozen=True, slots=True)
class Asked:
    completion_id: str
    body: CompletionBody
    plans: list[PromptPlan]
    format: AnswerFormat


AskReader = Callable[[bytes, Tenant], Awaitable[Asked]]


def completion_reader(service: CompletionService) -> AskReader:
    async def read(raw: bytes, tenant: Tenant) -> Asked:
        body, plans = await service.plan(raw, tenant)
        completion_id = f"cmpl-{uuid.uuid4().hex}"
        return Asked(completion_id, body, plans, CompletionFormat(completion_id, body, service.facts()))

    return read


def chat_reader(service: CompletionService, chat: Chat) -> AskReader:
    async def read(raw: bytes, tenant: Tenant) -> Asked:
        asked = parse_chat(raw)
        body = asked.as_completion()
        facts = await service.awaited_facts()
        check_model(body.model, facts)
        chat.check_tools(asked)
        try:
            prompt = await service.encoder.apart(len(raw), lambda: chat.prompt(asked, facts))
            plans = service.plan_prompts(body, [prompt.text], [prompt.token_ids], tenant, facts.max_model_len)
        except InvalidRequestError as error:
            if error.param != "prompt":
                raise
            raise type(error)(error.message, param="messages") from error  # as its client calls it
        completion_id = f"chatcmpl-{uuid.uuid4().hex}"
        plans = [replace(plan, is_chat=True, shown_ids=chat.shown_ids) for plan in plans]
        return Asked(completion_id, body, plans, ChatFormat(completion_id, asked, facts, chat, prompt.text))

    return read
