"""Requests as plain calls: prompts in, finished outputs back, in the prompts' order."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from tandem.engine.process.watched import log_only, watched_thread
from tandem.llm.async_llm import AsyncLLM
from tandem.llm.lora_request import LoRARequest
from tandem.llm.outputs import BeamSearchOutput, PooledOutput, RequestOutput
from tandem.llm.params import BeamSearchParams, SamplingParams
from tandem.llm.prompts import PromptInput, each_prompt, read_prompts

MAX_AT_A_TIME = 512  # a guess: more than nodes run at a time, fewer than a router's queue holds
T = TypeVar("T")


class LLM:
    """A model for scripts, as `AsyncLLM` is for servers: the same arguments, calls that wait, an event loop in a thread
    of its own.

    The server that it starts ends with `close`, with the `with` block, or with the process.
    """

    def __init__(self, model: str = "", **arguments: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = watched_thread(self._loop.run_forever, "tandem-llm", on_failure=log_only)
        self._thread.start()
        self._lock = threading.Lock()
        self._closed = False
        try:
            self._llm = AsyncLLM(model, **arguments)
            try:
                self._wait(self._llm.ready())
            except BaseException:
                self._wait(self._llm.aclose())
                raise
        except BaseException:
            self._stop_loop()
            raise

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the requests under way, and the server if it is this object's own. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        with contextlib.suppress(Exception):
            self._wait(self._llm.aclose())
        self._stop_loop()

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> list[RequestOutput]:
        """The outputs of all prompts, in their order; one `SamplingParams` for all, or one each.

        The first error ends the others, too. Raises the errors of `tandem.errors`; ValueError for what is no prompt.
        """
        ask = partial(self._llm.complete, lora_request=lora_request)
        return self._all(ask, each_prompt(prompts), sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
        **fields: Any,
    ) -> list[RequestOutput]:
        """The model's answers to a conversation (a list of messages), or to each of a list of conversations.

        `fields` are others of the chat API: `tools`, `chat_template_kwargs` ... Raises as `generate` does.
        """
        conversations = [messages] if all(isinstance(each, Mapping) for each in messages) else list(messages)
        ask = partial(self._llm.complete_chat, lora_request=lora_request, **fields)
        return self._all(ask, conversations, sampling_params, use_tqdm)

    def beam_search(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        lora_request: LoRARequest | None = None,
    ) -> list[BeamSearchOutput]:
        """The `beam_width` likeliest outputs of each prompt, in the prompts' order. Raises as `generate` does."""
        given, ask = each_prompt(prompts), partial(self._llm.complete, lora_request=lora_request)
        outputs = self._all(ask, given, params.as_sampling(), use_tqdm)
        return [BeamSearchOutput.of(output) for output in outputs]

    def embed(self, prompts: PromptInput | Sequence[PromptInput]) -> list[PooledOutput]:
        """Vectors of all prompts, in their order, of a model that embeds; `outputs.embedding` has each."""
        given = read_prompts(prompts)
        parts = [given[i : i + MAX_AT_A_TIME] for i in range(0, len(given), MAX_AT_A_TIME)]
        found = [output for part in parts for output in self._wait(self._llm.embed(part))]
        return [replace(output, index=index) for index, output in enumerate(found)]

    encode = embed

    def score(self, text_1: str | Sequence[str], text_2: str | Sequence[str]) -> list[PooledOutput]:
        """How well one text goes with each of others, or each with its counterpart; `outputs.score` in [0, 1]."""
        return self._wait(self._llm.score(text_1, text_2))

    def submit(self, prompt: PromptInput, sampling_params: SamplingParams | None = None) -> Future[RequestOutput]:
        """One request as a future; cancelling it ends the request."""
        return self._begin(self._llm.complete(prompt, sampling_params))

    def _all(
        self,
        ask: Callable[[Any, SamplingParams | None], Coroutine[Any, Any, RequestOutput]],
        given: list[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        params = sampling_params if isinstance(sampling_params, Sequence) else [sampling_params] * len(given)
        if len(params) != len(given):
            raise ValueError(f"{len(params)} sampling parameters for {len(given)} prompts: give one, or one each")
        return self._wait(_gather([partial(ask, *request) for request in zip(given, params, strict=True)], use_tqdm))

    def _begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._loop.is_closed():
            work.close()
            raise RuntimeError("this LLM is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future = self._begin(work)
        try:
            return future.result()
        finally:
            future.cancel()  # an interrupt from the keyboard ends what it was waiting for

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _gather(
    requests: list[Callable[[], Coroutine[Any, Any, RequestOutput]]], use_tqdm: bool
) -> list[RequestOutput]:
    from tqdm import tqdm

    room = asyncio.Semaphore(MAX_AT_A_TIME)
    with tqdm(total=len(requests), desc="prompts", disable=None if use_tqdm else True) as progress:

        async def one(request: Callable[[], Coroutine[Any, Any, RequestOutput]]) -> RequestOutput:
            async with room:
                output = await request()
            progress.update()
            return output

        tasks = [asyncio.ensure_future(one(request)) for request in requests]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
