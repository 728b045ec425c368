"""What a body asks for, by whichever path it came: a completion to be made, and how its answer is written."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from tandem.engine.contracts.errors import InvalidRequestError
from tandem.router.access.api_keys import Tenant
from tandem.router.chat.chat import Chat
from tandem.router.chat.chat_body import ChatBody, parse_chat
from tandem.router.http.chat_responses import ChatFormat
from tandem.router.http.http_io import JSON
from tandem.router.http.responses import AnswerFormat, CompletionFormat
from tandem.router.requests.service import CompletionService
from tandem.router.responses.body import parse_responses
from tandem.router.responses.format import ResponsesAnswer, ResponsesFormat
from tandem.router.text.completion import PromptPlan, check_task, held_to
from tandem.router.text.openai_api import CompletionBody


def _makes_text(index: int, values: bytes) -> None:
    raise AssertionError("a model that generates has pooled")


@dataclass(frozen=True, slots=True)
class Asked:
    """What one HTTP request asks for: a completion's id, its prompts, and the form of its answer."""

    completion_id: str
    body: CompletionBody
    plans: list[PromptPlan]
    format: AnswerFormat
    on_pooled: Callable[[int, bytes], None] = _makes_text  # for models that pool: takes an input's index and values
    content_type: bytes = JSON  # of an answer that is not streamed


AskReader = Callable[[bytes, Tenant], Awaitable[Asked]]


def completion_reader(service: CompletionService) -> AskReader:
    async def read(raw: bytes, tenant: Tenant) -> Asked:
        body, plans = await service.plan(raw, tenant)
        completion_id, shown_id = _ids("cmpl-", body)
        return Asked(completion_id, body, plans, CompletionFormat(shown_id, body, service.facts_of(body.model)))

    return read


def chat_reader(service: CompletionService, chat: Chat) -> AskReader:
    async def read(raw: bytes, tenant: Tenant) -> Asked:
        asked = parse_chat(service.bodies, raw)
        planned = await _plan_chat(service, chat, asked, len(raw), tenant)
        completion_id, shown_id = _ids("chatcmpl-", planned.body)
        form = ChatFormat(shown_id, asked, service.facts_of(asked.model), chat, planned.prompt)
        return Asked(completion_id, planned.body, planned.plans, form)

    return read


def responses_reader(service: CompletionService, chat: Chat) -> AskReader:
    async def read(raw: bytes, tenant: Tenant) -> Asked:
        body = parse_responses(service.bodies, raw)
        asked = body.as_chat()
        try:
            planned = await _plan_chat(service, chat, asked, len(raw), tenant)
        except InvalidRequestError as error:
            raise body.renamed(error) from error
        response_id, shown_id = _ids("resp_", planned.body)
        answer = ResponsesAnswer(asked, chat, planned.prompt)
        form = ResponsesFormat(shown_id, service.facts_of(body.model).name, body, planned.plans[0].sampling, answer)
        return Asked(response_id, planned.body, planned.plans, form)

    return read


@dataclass(frozen=True, slots=True)
class _PlannedChat:
    body: CompletionBody
    plans: list[PromptPlan]
    prompt: str


async def _plan_chat(
    service: CompletionService, chat: Chat, asked: ChatBody, num_bytes: int, tenant: Tenant
) -> _PlannedChat:
    """Plans the completion that a conversation asks for. `num_bytes`: the size of its body. Raises what
    CompletionService.plan raises."""
    body = asked.as_completion()
    facts = await service.awaited_facts(body.model)
    service.adapter_of(body.model, facts)
    check_task(facts, "generate")
    chat.check_tools(asked)
    try:
        media = await service.media.read(asked.messages, facts)
        if media is not None and body.truncate_prompt_tokens is not None:
            raise InvalidRequestError(
                "truncate_prompt_tokens is for text alone: images and sounds are whole or left out",
                param="truncate_prompt_tokens",
            )
        prompt = await service.encoder.apart(num_bytes, lambda: chat.prompt(asked, facts, media))
        plans = service.plan_prompts(body, [prompt.text], [prompt.token_ids], tenant, facts.max_model_len)
    except InvalidRequestError as error:
        if error.param != "prompt":
            raise
        raise type(error)(error.message, param="messages") from error  # the client has no field `prompt`
    if (asked_for := chat.grammar(asked, prompt.text)) is not None:
        plans = held_to(plans, await service.grammars.check(*asked_for))
    shown = chat.shown_ids
    plans = [
        replace(plan, is_chat=True, media=prompt.media or plan.media, shown_ids=shown | plan.shown_ids)
        for plan in plans
    ]
    return _PlannedChat(body, plans, prompt.text)


def _ids(kind: str, body: CompletionBody) -> tuple[str, str]:
    """(the request's own id, the id that its client reads). Ids that clients choose need not be unique, so nodes never
    see them."""
    own = kind + uuid.uuid4().hex
    return own, own if body.request_id is None else kind + body.request_id
