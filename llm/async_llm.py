"""Requests as coroutines: one HTTP client over a server of its own, or over one that runs somewhere."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, TypeAlias

import httpx

from tandem.engine.contracts.errors import OverloadedError, TandemError, TransportError
from tandem.engine.process.watched import log_only, watched_task
from tandem.llm.http_errors import error_of
from tandem.llm.local_server import LocalServer
from tandem.llm.lora_request import LoRARequest
from tandem.llm.outputs import CompletionOutput, EmbeddingOutput, PooledOutput, RequestOutput, ScoreOutput
from tandem.llm.params import SamplingParams
from tandem.llm.prompts import PromptInput, read_media, read_prompt, read_prompts, refuse

START_S = 600.0  # a guess: large models from slow disks
REQUEST_S = 3600.0  # a guess: above what a server grants a request, which ends it first
CONNECT_S = 10.0  # a guess
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
EMBEDDINGS, SCORE = "/v1/embeddings", "/score"
LOAD_ADAPTER = "/v1/load_lora_adapter"
DEFAULT_PAUSE_S = 1.0  # a guess: where an overloaded server names none

Messages: TypeAlias = Iterable[Mapping[str, Any]]


class AsyncLLM:
    """A model that serves many requests at a time; a context manager that leaves nothing behind.

    `AsyncLLM(model)` starts a single node of its own, `AsyncLLM(model, prefill=1, decode=1)` a split cluster; further
    keywords are the options of `tandem serve` (`max_model_len=4096`). `AsyncLLM(url=...)` asks a server that runs,
    with its `api_key` where it wants one. Raises ConfigError for options. `ready`, or the first request, or `async
    with` waits until the server is up.
    """

    def __init__(
        self,
        model: str = "",
        *,
        url: str = "",
        api_key: str = "",
        start_s: float = START_S,
        quiet: bool = False,
        **options: Any,
    ) -> None:
        self._server: LocalServer | None = None
        if url:
            if options:
                raise ValueError(f"{', '.join(options)}: options of a server that this call starts; {url} has its own")
        else:
            self._server = LocalServer(model, options, start_s, quiet)
            api_key = self._server.api_key
            model = ""  # it serves one, under whatever name
        self._named = {"model": model} if model else {}
        self._url = url.rstrip("/").removesuffix("/v1")
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(REQUEST_S, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )
        self._running: dict[str, asyncio.Task[Any]] = {}
        self._adapters: dict[str, str] = {}  # folders of those that this object has loaded, by name
        self._loading = asyncio.Lock()

    @property
    def is_ready(self) -> bool:
        """Whether its server is up, as far as is known without asking it."""
        return self._server is None or bool(self._server.url)

    async def ready(self) -> None:
        """Waits until the server is up. Raises ConfigError when a server of its own can't start."""
        if self._server is not None and not self.is_ready:
            await asyncio.to_thread(self._server.wait_ready)
            self._url = self._server.url

    async def __aenter__(self) -> AsyncLLM:
        try:
            await self.ready()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Aborts what is under way and ends the server, if it is its own. Idempotent."""
        for request_id in list(self._running):
            self.abort(request_id)
        await self._client.aclose()
        if self._server is not None:
            await asyncio.to_thread(self._server.close)

    async def generate(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams | None = None,
        request_id: str = "",
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yields the request's output each time that it grew, the same object; the last one is `finished`.

        Leaving the loop, or `abort`, ends the request at the server, too. Raises the errors of `tandem.errors`.
        """
        sampling_params = sampling_params or SamplingParams()
        output = _empty_output(request_id, prompt, sampling_params)
        body = self._body(prompt, sampling_params) | await self._adapted(lora_request)
        async for grown in self._grow(output, COMPLETIONS, body):
            yield grown

    async def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        request_id: str = "",
        lora_request: LoRARequest | None = None,
        **fields: Any,
    ) -> AsyncIterator[RequestOutput]:
        """`generate` for the answer to a conversation. `fields` are others of the chat API: `tools`, `tool_choice`,
        `chat_template_kwargs`, `add_generation_prompt` ..."""
        sampling_params = sampling_params or SamplingParams()
        output = _empty_output(request_id, "", sampling_params)
        body = self._chat_body(messages, sampling_params, fields) | await self._adapted(lora_request)
        async for grown in self._grow(output, CHAT, body):
            yield grown

    async def _grow(self, output: RequestOutput, path: str, body: dict[str, Any]) -> AsyncIterator[RequestOutput]:
        request_id = output.request_id
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        events: asyncio.Queue[dict[str, Any] | BaseException | None] = asyncio.Queue()
        self._running[request_id] = task = watched_task(self._stream(path, body, events), request_id, log_only)
        task.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (event := await events.get()) is not None:
                if isinstance(event, BaseException):
                    raise event
                output.add(event)
                output.finished = bool(event.get("usage"))
                yield output
            if not output.finished:
                output.end("abort")
                yield output
        finally:
            task.cancel()
            del self._running[request_id]

    async def complete(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams | None = None,
        request_id: str = "",
        lora_request: LoRARequest | None = None,
    ) -> RequestOutput:
        """The whole output of one request; waits as the server asks while it is overloaded."""
        sampling_params = sampling_params or SamplingParams()
        body = self._body(prompt, sampling_params) | await self._adapted(lora_request)
        return await self._fill(_empty_output(request_id, prompt, sampling_params), COMPLETIONS, body)

    async def complete_chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        request_id: str = "",
        lora_request: LoRARequest | None = None,
        **fields: Any,
    ) -> RequestOutput:
        """`complete` for the answer to a conversation; `fields` as for `chat`."""
        sampling_params = sampling_params or SamplingParams()
        body = self._chat_body(messages, sampling_params, fields) | await self._adapted(lora_request)
        return await self._fill(_empty_output(request_id, "", sampling_params), CHAT, body)

    async def embed(self, prompts: PromptInput | Sequence[PromptInput]) -> list[PooledOutput]:
        """A vector of each prompt, in their order, of a model that embeds."""
        said = await self._ask(EMBEDDINGS, {"input": read_prompts(prompts)})
        return [PooledOutput(row["index"], EmbeddingOutput(row["embedding"])) for row in said["data"]]

    async def score(self, text_1: str | Sequence[str], text_2: str | Sequence[str]) -> list[PooledOutput]:
        """How well `text_1` goes with each of `text_2`, or each with its counterpart, by a model that scores."""
        said = await self._ask(SCORE, {"text_1": text_1, "text_2": text_2})
        return [PooledOutput(row["index"], ScoreOutput(row["score"])) for row in said["data"]]

    async def _ask(self, path: str, body: dict[str, Any]) -> Any:
        async with self._answer(path, {**self._named, **body}) as response:
            await response.aread()
        return _json(response)

    def submit(self, prompt: PromptInput, sampling_params: SamplingParams | None = None) -> asyncio.Task[RequestOutput]:
        """`complete` as a future, begun at once; cancelling it ends the request."""
        request_id = secrets.token_hex(8)
        task = asyncio.create_task(self.complete(prompt, sampling_params, request_id))
        self._running[request_id] = task
        task.add_done_callback(lambda _: self._running.pop(request_id, None))
        return task

    def abort(self, request_id: str) -> None:
        """Ends a request: `generate` yields what there is with the finish reason "abort", `complete` and futures are
        cancelled. Nothing happens where it has ended."""
        if task := self._running.get(request_id):
            task.cancel()

    async def _adapted(self, lora_request: LoRARequest | None) -> dict[str, str]:
        """The field of a body that names an adapter, which the server has loaded then."""
        if lora_request is None:
            return {}
        name, path = lora_request.lora_name, lora_request.lora_path
        async with self._loading:
            if path and self._adapters.get(name) != path:
                body = {"lora_name": name, "lora_path": path, "load_inplace": True}
                async with self._answer(LOAD_ADAPTER, body) as response:
                    await response.aread()
                self._adapters[name] = path
        return {"model": name}

    def _body(self, prompt: PromptInput, sampling_params: SamplingParams) -> dict[str, Any]:
        asked = {**self._named, "prompt": read_prompt(prompt), **read_media(prompt), "return_token_ids": True}
        return {**asked, **sampling_params.as_body()}

    def _chat_body(self, messages: Messages, sampling_params: SamplingParams, fields: dict[str, Any]) -> dict[str, Any]:
        refuse(fields)
        asked = {**self._named, "messages": list(messages), "return_token_ids": True}
        return {**asked, **sampling_params.as_chat_body(), **fields}

    @asynccontextmanager
    async def _answer(self, path: str, body: dict[str, Any]) -> AsyncIterator[httpx.Response]:
        """The server's answer to a body, to be read. An overloaded server is asked again after the pause that it names;
        other refusals are raised, and so is a connection that fails or breaks."""
        await self.ready()
        try:
            while True:
                async with self._client.stream("POST", self._url + path, json=body) as response:
                    if response.status_code == 200:
                        yield response
                        return
                    await response.aread()
                if response.status_code != OverloadedError.status:
                    raise error_of(_json(response), response.status_code)
                await asyncio.sleep(_retry_after(response))
        except httpx.HTTPError as error:
            raise TransportError(f"no answer from the server: {str(error) or type(error).__name__}") from error

    async def _fill(self, output: RequestOutput, path: str, body: dict[str, Any]) -> RequestOutput:
        async with self._answer(path, body) as response:
            await response.aread()
        output.add(_json(response))
        output.finished = True
        return output

    async def _stream(self, path: str, body: dict[str, Any], events: asyncio.Queue[Any]) -> None:
        """Puts each event of the answer, or the error that ends it, into the queue."""
        try:
            async with self._answer(path, body) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        event = json.loads(line[6:])
                        events.put_nowait(error_of(event) if "error" in event else event)
        except TandemError as error:
            events.put_nowait(error)


def _empty_output(request_id: str, prompt: PromptInput, sampling_params: SamplingParams) -> RequestOutput:
    request_id = request_id or secrets.token_hex(8)
    given = read_prompt(prompt)
    rivals = sampling_params.logprobs or 0
    samples = [CompletionOutput(index, num_rivals=rivals) for index in range(sampling_params.n)]
    if isinstance(given, str):
        return RequestOutput(request_id, given, [], samples)
    return RequestOutput(request_id, None, given, samples)


def _json(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return None


def _retry_after(response: httpx.Response) -> float:
    try:
        return max(0.0, float(response.headers.get("retry-after", DEFAULT_PAUSE_S)))
    except ValueError:
        return DEFAULT_PAUSE_S
