"""Clients that ask one request after the other and compare every answer with the right one."""

from __future__ import annotations

import contextlib
import random
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable

import httpx
from asks import Abandoned, Ask, Refused, ask, difference

HONEST = {0, 429, 500, 502, 503, 504}  # 0: an error inside a stream
MAX_WAIT_S = 120.0  # of silence; the cluster's own deadline for a request is shorter


class Clients:
    """Run until `stop` and ask what `draw` returns. `wrong` says what broke a promise, `errors` counts honest ones by
    their text. A connection may be refused or break while `may_be_gone()`: the router itself was hurt."""

    def __init__(
        self,
        url: str,
        draw: Callable[[random.Random], Ask],
        seed: int,
        count: int,
        may_be_gone: Callable[[], bool] = lambda: False,
    ) -> None:
        self._url, self._draw, self._seed, self._may_be_gone = url, draw, seed, may_be_gone
        self._stopping = threading.Event()
        self.ends: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.slowest_s = 0.0
        self._threads = [threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(count)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> int:
        """How many clients never got an end of their request."""
        self._stopping.set()
        deadline = time.monotonic() + MAX_WAIT_S + 30
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return sum(thread.is_alive() for thread in self._threads)

    def _run(self, number: int) -> None:
        rng = random.Random(f"{self._seed} {number}")
        with httpx.Client(base_url=self._url, timeout=MAX_WAIT_S) as client:
            while not self._stopping.is_set():
                started = time.monotonic()
                end = self._one(client, rng)
                self.slowest_s = max(self.slowest_s, time.monotonic() - started)
                self.ends[end] += 1
                if end == "refused":
                    self._wait_for_a_listener()
                elif end not in ("equal", "left"):
                    time.sleep(0.3)

    def _one(self, client: httpx.Client, rng: random.Random) -> str:
        each = self._draw(rng)
        stream = rng.random() < 0.6 and "prompt_logprobs" not in each.body  # those are refused in streams
        leave_after = rng.choice((1, 5, 20)) if stream and rng.random() < 0.05 else 0
        try:
            got = ask(client, each.body, stream, leave_after)
        except Abandoned:
            return "left"
        except Refused as error:
            self.errors[f"{error.status or 'stream'}: {re.sub('[0-9.]+', '#', error.message)}"] += 1
            if error.status in HONEST and error.message:
                return "error in the stream" if not error.status else str(error.status)
            self.wrong.append(f"{error.status} {error.message} to {_brief(each)}")
            return "wrong"
        except httpx.TimeoutException:
            self.wrong.append(f"no answer within {MAX_WAIT_S:g} s to {_brief(each)}")
            return "hung"
        except httpx.TransportError as error:
            if not self._may_be_gone():
                self.wrong.append(f"{error!r} with a router that nobody hurt, for {_brief(each)}")
            return "refused" if isinstance(error, httpx.ConnectError) else "connection"
        except Exception as error:  # whatever it is, it must be in the report
            self.wrong.append(f"{error!r} for {_brief(each)}")
            return "wrong"
        differs = difference(each.expected, got) if each.expected is not None else ""
        if differs:
            self.wrong.append(f"{differs} (stream: {stream}) for {_brief(each)}")
        return "wrong" if differs else "equal"

    def _wait_for_a_listener(self) -> None:
        """One outage is one refusal for each client, however long it lasts."""
        url = httpx.URL(self._url)
        while not self._stopping.is_set():
            with contextlib.suppress(OSError), socket.create_connection((url.host, url.port), 10):
                return
            time.sleep(0.3)


def _brief(each: Ask) -> str:
    prompt = each.body["prompt"]
    return str({**each.body, "prompt": f"{len(prompt)} tokens from {prompt[:3]}"})
