"""docs/compatibility.md says of each field what the code does with it, and leaves out none of openai's client."""

from __future__ import annotations

import re
import typing
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsStreaming
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming

from tandem.engine.contracts.errors import InvalidRequestError
from tandem.router.chat.chat_body import ChatBody, parse_chat
from tandem.router.responses.body import ResponsesBody, parse_responses
from tandem.router.text.body_reader import BodyReader
from tandem.router.text.openai_api import CompletionBody

PAGE = Path(__file__).resolve().parents[4] / "docs" / "compatibility.md"
STATES = ("same", "differs", "accepted", "left out", "refused")


def read_completion(bodies: BodyReader, raw: bytes) -> CompletionBody:
    return bodies.read(CompletionBody, raw)


READERS: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "/v1/chat/completions": (ChatParams, ChatBody, parse_chat, {"messages": [{"role": "user", "content": "a"}]}),
    "/v1/completions": (CompletionCreateParamsStreaming, CompletionBody, read_completion, {"prompt": "a"}),
    "/v1/responses": (ResponseCreateParamsStreaming, ResponsesBody, parse_responses, {"input": "a"}),
}


@cache
def rows(path: str) -> dict[str, str]:
    """Field -> state, of the table below the path's headline."""
    section = PAGE.read_text().partition(f"## {path}\n")[2].partition("\n## ")[0]
    found: dict[str, str] = {}
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 3 and cells[1] in STATES:
            names = re.findall(r"`(\w+)`", cells[0])
            assert not found.keys() & set(names), f"twice: {found.keys() & set(names)}"
            found |= dict.fromkeys(names, cells[1])
        elif len(cells) == 3:
            assert cells[0] in ("field", "---"), f"no such state: {line}"
    return found


@pytest.mark.parametrize("path", READERS)
def test_every_field_has_a_row(path: str) -> None:
    params, body, _, _ = READERS[path]
    names = {*typing.get_type_hints(params), *(field.encode_name for field in msgspec.structs.fields(body))}
    assert sorted(names - rows(path).keys()) == []


@pytest.mark.parametrize("path", READERS)
def test_every_row_is_true(path: str) -> None:
    _, body, parse, least = READERS[path]
    names = {field.encode_name for field in msgspec.structs.fields(body)}
    wrong = []
    for name, state in rows(path).items():
        if state == "refused":
            if not all(refuses(parse, least, name, value) for value in ("x", {"a": 1}, True, 3)):
                wrong.append(f"{name} isn't refused")
        elif (name in names) != (state != "left out"):
            wrong.append(f"{name} is {state}, and is {'' if name in names else 'not '}a field")
        elif state == "left out":
            parse(BodyReader(), msgspec.json.encode({**least, name: "x"}))
    assert wrong == []


def refuses(parse: Any, least: dict[str, Any], name: str, value: Any) -> bool:
    try:
        parse(BodyReader(), msgspec.json.encode({**least, name: value}))
    except InvalidRequestError as error:
        return error.param == name
    return False
