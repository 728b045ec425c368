"""One streaming completion on a thread of its own, for tests that watch it while nodes come and go."""

from __future__ import annotations

import json
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
from waiting import PATIENCE_S, wait_until


class Stream:
    """Token ids of each sample in the order in which they came."""

    def __init__(self, url: str, model: str, prompt: list[int], num_tokens: int, **fields: object) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.error: dict[str, object] = {}
        self.ends: dict[int, str] = {}
        self._is_stopped = False
        body = {
            "model": model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, "stream": True, **fields,
        }  # fmt: skip
        self._done: Future[None] = ThreadPoolExecutor(1).submit(self._read, url, body)

    def _read(self, url: str, body: dict[str, object]) -> None:
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=2 * PATIENCE_S) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if self._is_stopped or line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    self._take(json.loads(line.removeprefix("data: ")))

    def _take(self, event: dict) -> None:
        self.error = event.get("error", self.error)
        for choice in event.get("choices", ()):
            self.tokens.setdefault(choice["index"], []).extend(choice["token_ids"])
            if choice["finish_reason"]:
                self.ends[choice["index"]] = choice["finish_reason"]

    def wait_for(self, num_tokens: int, num_samples: int = 1) -> None:
        def has_come() -> bool:
            has_ended = self.has_ended  # asked first: what it brought is then all there
            if len(self.tokens) >= num_samples and min(map(len, self.tokens.values())) >= num_tokens:
                return True
            assert not has_ended, f"it ended before: {self.error or self.ends or self._done.result()}"
            return False

        wait_until(has_come, f"{num_tokens} tokens")

    @property
    def has_ended(self) -> bool:
        return self._done.done()

    def leave(self) -> None:
        """The client closes the connection."""
        self._is_stopped = True
        self._done.result(PATIENCE_S)

    def wait(self) -> None:
        """Until it has ended, one way or the other."""
        self._done.result(2 * PATIENCE_S)

    def finish(self) -> dict[int, list[int]]:
        self.wait()
        assert not self.error, self.error
        return self.tokens

    @property
    def is_over(self) -> bool:
        return self._done.done()
