"""What openai's client has around its calls, against a split cluster: helpers that parse and gather, raw answers,
timeouts, retries, the asynchronous client. The calls themselves: test_chat.py, test_responses.py."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Annotated, Any

import httpx
import openai
import pydantic
import pytest
from router_in_thread import RouterInThread
from scripted_model import SCRIPTS, make_scripted_model
from waiting import PATIENCE_S

from in_process_cluster import Node, node_options

ASKED: list[Any] = [{"role": "user", "content": "Who?"}]


class Person(pydantic.BaseModel):
    name: Annotated[str, pydantic.Field(max_length=6)]
    age: Annotated[int, pydantic.Field(ge=0, le=99)]


PERSON = openai.pydantic_function_tool(Person)


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterInThread]:
    folder, _ = make_scripted_model(tmp_path_factory.mktemp("models") / "scripted")
    nodes = [Node(node_options(role, folder)) for role in ("prefill", "decode")]
    addresses = tuple(node.info.control_address for node in nodes)
    with RouterInThread(folder, addresses, local_tail_tokens=0) as router:
        yield router.wait_ready()
    for node in nodes:
        node.stop()


@pytest.fixture(scope="module")
def client(router: RouterInThread) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


def fields(script: str = "hello", **more: Any) -> dict[str, Any]:
    extra = {"chat_template_kwargs": {"script": script}, **more.pop("extra_body", {})}
    return {"model": "scripted", "temperature": 0.0, "extra_body": extra, **more}


def test_chats_stream_is_gathered_and_parsed(client: openai.OpenAI) -> None:
    asked = fields("think", messages=ASKED, max_tokens=300)
    with client.chat.completions.stream(**asked, response_format=Person, logprobs=True) as stream:
        events = list(stream)
        final = stream.get_final_completion().choices[0]
    whole = client.chat.completions.parse(**asked, response_format=Person).choices[0]
    assert isinstance(final.message.parsed, Person)
    assert final.message.parsed == whole.message.parsed
    assert final.message.content == whole.message.content
    kinds = [event.type for event in events]
    assert kinds.count("content.delta") > 3, "the text came in one piece"
    [done] = [event for event in events if event.type == "content.done"]
    assert done.parsed == final.message.parsed
    assert final.logprobs is not None
    called: Any = {"tools": [PERSON], "tool_choice": "required", "parallel_tool_calls": False}
    with client.chat.completions.stream(**asked, **called) as stream:
        [call] = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
    assert isinstance(call.parsed_arguments, Person)
    parsed = client.chat.completions.parse(**asked, **called).choices[0].message
    assert [made.function.parsed_arguments for made in parsed.tool_calls or []] == [call.parsed_arguments]
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**{**asked, "max_tokens": 3}, response_format=Person)


def test_responses_are_parsed_whole_and_streamed(client: openai.OpenAI) -> None:
    asked = fields("think", input="Who?", max_output_tokens=300)
    whole = client.responses.parse(**asked, text_format=Person)
    with client.responses.stream(**asked, text_format=Person) as stream:
        done = [event for event in stream if event.type == "response.output_text.done"]
        final = stream.get_final_response()
    assert isinstance(whole.output_parsed, Person)
    assert whole.output_parsed == final.output_parsed == done[0].parsed


def test_raw_answers_have_headers_and_bytes(client: openai.OpenAI) -> None:
    asked = fields(messages=ASKED)
    raw = client.chat.completions.with_raw_response.create(**asked, extra_headers={"X-Request-Id": "mine"})
    assert (raw.status_code, raw.request_id, raw.headers["content-type"]) == (200, "mine", "application/json")
    answer = raw.parse()
    assert answer.choices[0].message.content == SCRIPTS["hello"]
    assert json.loads(raw.content)["id"] == answer.id
    assert answer._request_id == "mine"
    with client.chat.completions.with_streaming_response.create(**asked, stream=True) as streaming:
        lines = [line for line in streaming.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert all(line.startswith("data: ") for line in lines)
    with client.completions.with_streaming_response.create(model="scripted", prompt="x", max_tokens=2) as streaming:
        assert streaming.parse().usage.completion_tokens == 2


def test_who_waits_no_longer_is_let_go(client: openai.OpenAI, router: RouterInThread) -> None:
    long = {"model": "scripted", "prompt": "x", "max_tokens": 900, "extra_body": {"ignore_eos": True}}
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.001).completions.create(**long)
    with client.completions.create(**long, stream=True) as stream:
        next(iter(stream))
    router.wait_idle()


def test_a_client_that_is_refused_asks_again(router: RouterInThread) -> None:
    """What comes between a client and the router turns two requests away, as a full server does."""
    turned_away: list[str] = []

    class Turnstile(httpx.HTTPTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            if len(turned_away) < 2:
                turned_away.append(request.headers["x-stainless-retry-count"])
                return httpx.Response(429, headers={"Retry-After": "0.01"}, request=request)
            return super().handle_request(request)

    http = httpx.Client(transport=Turnstile())
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=2, http_client=http) as client:
        answer = client.chat.completions.create(**fields(messages=ASKED))
    assert (turned_away, answer.choices[0].message.content) == (["0", "1"], SCRIPTS["hello"])


async def test_the_asynchronous_client(router: RouterInThread) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
    ) as client:
        assert [model.id async for model in client.models.list()] == ["scripted"]

        async def streamed() -> str:
            stream = await client.chat.completions.create(**fields(messages=ASKED, stream=True))
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        async def parsed() -> Any:
            asked = fields("think", messages=ASKED, max_tokens=300)
            async with client.chat.completions.stream(**asked, response_format=Person) as stream:
                return (await stream.get_final_completion()).choices[0].message.parsed

        async def responded() -> str:
            return (await client.responses.create(**fields(input="What?"))).output_text

        async def completed() -> int:
            asked = fields(prompt="x", max_tokens=5, stream=True, stream_options={"include_usage": True})
            stream = await client.completions.create(**asked)
            return [chunk async for chunk in stream][-1].usage.completion_tokens

        said = await asyncio.gather(*[streamed() for _ in range(8)], parsed(), responded(), completed())
        leaving = asyncio.create_task(streamed())
        await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
    assert said[:8] == [SCRIPTS["hello"]] * 8
    assert isinstance(said[8], Person)
    assert said[9:] == [SCRIPTS["hello"], 5]
    await asyncio.to_thread(router.wait_idle)
