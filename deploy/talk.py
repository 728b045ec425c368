"""`tandem chat` and `tandem complete`: a running server in the terminal, its answers as they come."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from tandem.deploy.bench.sse_client import HttpError, model_to_ask, stream_events
from tandem.deploy.command_line.closed_output import nobody_reads

HELP = "/clear forgets what was said, /exit or Ctrl-D leaves; Ctrl-C ends an answer; a line that ends with \\ goes on"
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


def run_chat(arguments: argparse.Namespace) -> int:
    """Holds a conversation, or answers one message where that is given or standard input is no terminal."""
    return _run(Conversation(arguments, _model(arguments)), arguments.message)


def run_complete(arguments: argparse.Namespace) -> int:
    """Completes a prompt, what standard input holds, or each text that is typed."""
    return _run(CompletedTexts(arguments, _model(arguments)), arguments.prompt)


def _model(arguments: argparse.Namespace) -> str:
    return asyncio.run(model_to_ask(arguments.url, arguments.api_key, arguments.model))


def _run(talk: Conversation | CompletedTexts, given: str) -> int:
    """Holds the talk; returns the exit code, 1 when an answer did not come whole."""
    if given or not sys.stdin.isatty():
        return 0 if talk.say(given or sys.stdin.read()) else 1
    print(_dimmed(f"{talk.model} at {talk.url}; {HELP}"))
    for text in _typed():
        if text == "/clear":
            talk.forget()
        elif text == "/help":
            print(HELP)
        elif text:
            talk.say(text)
    return 0


def _typed() -> Iterator[str]:
    """What is typed, until the end of it or /exit; Ctrl-C drops the line."""
    import readline  # noqa: F401  # gives input() its editing and its history

    lines: list[str] = []
    while True:
        try:
            line = input("... " if lines else ">>> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            lines.clear()
            print()
            continue
        lines.append(line.removesuffix("\\"))
        if line.endswith("\\"):
            continue
        text = "\n".join(lines).strip()
        lines.clear()
        if text in ("/exit", "/quit", "/bye"):
            return
        yield text


class Talk:
    """The common part of chats and completions. A text is sent to `path` in the body that `body` makes of it."""

    path = ""

    def __init__(self, options: argparse.Namespace, model: str) -> None:
        self.model, self.url = model, options.url
        self._options = options

    def body(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def show(self, choice: dict[str, Any]) -> str:
        """Prints an event's part of the answer and returns what belongs to its text."""
        raise NotImplementedError

    def forget(self) -> None:
        """Forgets what was said so far."""

    def remember(self, text: str, answer: str) -> None:
        """Keeps a text and its answer, as far as that came, for what is said next."""

    def say(self, text: str) -> bool:
        """Asks and shows the answer as it comes; Ctrl-C ends it. Returns whether all of it came."""
        parts: list[str] = []
        try:
            asyncio.run(self._follow(text, parts))
        except KeyboardInterrupt:
            print(_dimmed(" (stopped)"))
        except (OSError, HttpError, ValueError, EOFError) as error:
            if isinstance(error, BrokenPipeError) and nobody_reads(sys.stdout.fileno()):
                raise  # what broke is no connection: no answer is wanted any more
            print(f"tandem: {error}", file=sys.stderr)
            return False
        self.remember(text, "".join(parts))
        return True

    async def _follow(self, text: str, parts: list[str]) -> None:
        body, started, reason = self.body(text), time.monotonic(), ""
        usage: dict[str, Any] = {}
        async for event in self._events(body):
            for choice in event.get("choices") or ():
                parts.append(self.show(choice))
                reason = choice.get("finish_reason") or reason
            usage = event.get("usage") or usage
        print()
        took_s = time.monotonic() - started
        if sys.stdout.isatty() and usage:
            cut = ", cut off at the longest that was asked for" if reason == "length" else ""
            number = usage["completion_tokens"]
            print(_dimmed(f"{number} tokens, {number / took_s:.1f} a second{cut}"))

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Yields the events of the answer. Raises HttpError for an error in the stream, and for one that ends too
        early."""
        options = self._options
        body |= {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        body |= {name: getattr(options, name) for name in ("temperature", "top_p") if getattr(options, name) >= 0}
        async for data in stream_events(options.url, self.path, body, options.api_key):
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise HttpError(event["error"].get("message", "the stream ended with an error"))
            yield event
        raise HttpError("the stream ended without [DONE]")


class Conversation(Talk):
    """A chat: each answer and question stays in what is sent next."""

    path = "/v1/chat/completions"

    def __init__(self, options: argparse.Namespace, model: str) -> None:
        super().__init__(options, model)
        self.messages: list[dict[str, str]] = []
        self._is_reasoning = False
        self.forget()

    def forget(self) -> None:
        system = self._options.system_prompt
        self.messages = [{"role": "system", "content": system}] if system else []

    def remember(self, text: str, answer: str) -> None:
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]

    def body(self, text: str) -> dict[str, Any]:
        longest = {"max_completion_tokens": self._options.max_tokens} if self._options.max_tokens else {}
        return {"messages": [*self.messages, {"role": "user", "content": text}], **longest}

    def show(self, choice: dict[str, Any]) -> str:
        delta = choice.get("delta") or {}
        if reasoning := delta.get("reasoning") or delta.get("reasoning_content"):
            self._is_reasoning = True
            print(_dimmed(reasoning), end="", flush=True)
        text = delta.get("content") or ""
        if text and self._is_reasoning:
            self._is_reasoning = False
            print("\n")
        print(text, end="", flush=True)
        return text


class CompletedTexts(Talk):
    """Texts that are completed one by one, without memory of each other."""

    path = "/v1/completions"

    def body(self, text: str) -> dict[str, Any]:
        return {"prompt": text, "max_tokens": self._options.max_tokens or 128}

    def show(self, choice: dict[str, Any]) -> str:
        text = str(choice.get("text") or "")
        print(text, end="", flush=True)
        return text


def _dimmed(text: str) -> str:
    return f"{_DIM}{text}{_PLAIN}" if sys.stdout.isatty() else text
