"""Tokenizing off the event loop: what takes long must not hold up the streams and heartbeats of everybody."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from tandem.router.completion import ModelFacts, tokenize_prompts
from tandem.router.openai_api import Prompts
from tandem.router.tokenizer import Tokenizer

SHORT_BYTES = 8192  # up to this a thread costs more than it saves
MAX_THREADS = 4  # at once: a text of some megabytes takes hundreds of them as tokens

Result = TypeVar("Result")


class PromptEncoder:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._slots = asyncio.Semaphore(MAX_THREADS)

    async def encode(self, prompts: Prompts, num_bytes: int, facts: ModelFacts) -> list[list[int]]:
        """`num_bytes`: of the body that held them. Raises InvalidRequestError as `tokenize_prompts` does."""
        size = num_bytes if isinstance(prompts[0], str) else 0
        return await self.apart(size, lambda: tokenize_prompts(prompts, self._tokenizer, facts))

    async def apart(self, num_bytes: int, function: Callable[[], Result]) -> Result:
        """Runs it here when there is little to do, else on a thread."""
        if num_bytes <= SHORT_BYTES:
            return function()
        async with self._slots:
            return await asyncio.to_thread(function)
