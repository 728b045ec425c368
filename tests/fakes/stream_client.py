"""One streaming completion on a thread of its own, for tests that watch it while nodes come and go."""

from __future__ import annotations

import json
import time
from concurrent.futures import Future, ThreadPoolExecutor

import httpx


class Stream:
    """Token ids of each sample in the order in which they came, and when each event came."""

    def __init__(self, url: str, model: str, prompt: list[int], num_tokens: int, **fields: object) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.times: list[float] = []
        self.error: dict[str, object] = {}
        self.ends: dict[int, str] = {}
        self._is_stopped = False
        body = {
            "model": model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, "stream": True, **fields,
        }  # fmt: skip
        self._done: Future[None] = ThreadPoolExecutor(1).submit(self._read, url, body)

    def _read(self, url: str, body: dict[str, object]) -> None:
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=90) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if self._is_stopped or line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    self._take(json.loads(line.removeprefix("data: ")))

    def _take(self, event: dict) -> None:
        self.error = event.get("error", self.error)
        self.times.append(time.monotonic())
        for choice in event.get("choices", ()):
            self.tokens.setdefault(choice["index"], []).extend(choice["token_ids"])
            if choice["finish_reason"]:
                self.ends[choice["index"]] = choice["finish_reason"]

    def wait_for(self, num_tokens: int, num_samples: int = 1, timeout_s: float = 30.0) -> None:
        deadline = time.monotonic() + timeout_s
        while len(self.tokens) < num_samples or min(map(len, self.tokens.values())) < num_tokens:
            assert time.monotonic() < deadline, "no tokens"
            assert not self._done.done(), self._done.result()
            time.sleep(0.005)

    def leave(self) -> None:
        """The client closes the connection."""
        self._is_stopped = True
        self._done.result(30)

    def wait(self) -> None:
        """Until it has ended, one way or the other."""
        self._done.result(90)

    def finish(self) -> dict[int, list[int]]:
        self.wait()
        assert not self.error, self.error
        return self.tokens

    @property
    def is_over(self) -> bool:
        return self._done.done()

    @property
    def longest_gap_s(self) -> float:
        return max(after - before for before, after in zip(self.times, self.times[1:], strict=False))
