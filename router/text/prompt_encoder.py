"""Tokenizing off the event loop: what takes long must not hold up the streams and heartbeats of everybody."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from tandem.router.text.completion import CHARS_PER_TOKEN, ModelFacts, tokenize_prompts
from tandem.router.text.openai_api import Prompts, Side
from tandem.router.text.tokenizer import Tokenizer

SHORT_BYTES = 8192  # up to this a thread costs more than it saves; a guess
LARGE_BYTES = 1 << 18  # from this on one at a time: a text takes a hundred times its size in memory as tokens; a guess
MAX_THREADS = 4  # a guess

Result = TypeVar("Result")


class PromptEncoder:
    """Tokenizes prompts: short ones at once, longer ones on threads, very long ones one at a time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._slots, self._large_slot = asyncio.Semaphore(MAX_THREADS), asyncio.Semaphore(1)

    async def encode(
        self,
        prompts: Prompts,
        num_bytes: int,
        facts: ModelFacts,
        add_special_tokens: bool = True,
        cut: Side | None = None,
    ) -> list[list[int]]:
        """The token ids of each prompt. `num_bytes`: the length of the body that held them. Raises InvalidRequestError
        as `tokenize_prompts` does."""
        size = 0
        if isinstance(prompts[0], str):  # of a text that is far too long only this much is tokenized
            size = min(num_bytes, len(prompts) * CHARS_PER_TOKEN * facts.max_model_len)
        adds = add_special_tokens
        return await self.apart(size, lambda: tokenize_prompts(prompts, self._tokenizer, facts, adds, cut))

    async def apart(self, num_bytes: int, function: Callable[[], Result]) -> Result:
        """Runs `function` here when `num_bytes` is small, else on a thread."""
        if num_bytes <= SHORT_BYTES:
            return function()
        async with self._slots if num_bytes < LARGE_BYTES else self._large_slot:
            return await asyncio.to_thread(function)
