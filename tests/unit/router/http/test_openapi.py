"""/openapi.json says what there is, and nothing else; /docs shows it without anything from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from router_in_thread import RouterInThread
from starlette.routing import Route

from stand_in_node import StandInNode
from tandem.engine.contracts.config import ModelOptions, RouterOptions
from tandem.router.access.api_keys import ApiKeys
from tandem.router.access.gate import Gate
from tandem.router.chat.chat import Chat
from tandem.router.http.app import make_app
from tandem.router.http.openapi import description
from tandem.router.watching.desk import RequestDesk
from tandem.router.watching.feed import DashboardFeed


@pytest.fixture(scope="module")
def router(folder: Path, node: StandInNode) -> Iterator[RouterInThread]:
    with RouterInThread(folder, (node.address,), enable_tokenizer_info_endpoint=True) as router:
        yield router.wait_ready()


@pytest.fixture(scope="module")
def found(router: RouterInThread) -> dict[str, Any]:
    described: dict[str, Any] = router.client.get("/openapi.json").json()
    return described


def test_every_path_and_method_is_described(router: RouterInThread, folder: Path, found: dict[str, Any]) -> None:
    service = router.worker.service
    chat = Chat(folder, service.tokenizer, service.options)
    feed = DashboardFeed(RequestDesk(service, None))
    app = make_app(service, Gate(ApiKeys("", lambda name: b"")), chat, feed)
    served = {}
    for route in app.routes:
        assert isinstance(route, Route)
        served[route.path.replace(":path", "")] = {method.lower() for method in route.methods or ()}
    assert {path: set(methods) for path, methods in found["paths"].items()} == served


@pytest.mark.parametrize("is_strict", [False, True])
def test_a_form_with_a_file_is_one_of_those_described(is_strict: bool) -> None:
    described = description(RouterOptions(model=ModelOptions(model="m"), strict_requests=is_strict))
    form = described["paths"]["/v1/audio/transcriptions"]["post"]["requestBody"]["content"]["multipart/form-data"]
    assert form["schema"] == {"$ref": "#/components/schemas/TranscriptionBody"}
    fields = described["components"]["schemas"]["TranscriptionBody"]
    assert "file" in fields["required"]
    assert fields["properties"]["file"] == {"type": "string", "format": "binary"}
    assert fields.get("additionalProperties") == (False if is_strict else None)


def test_what_is_described_is_served(router: RouterInThread, found: dict[str, Any]) -> None:
    body = {"prompt": "a", "max_tokens": 1, "request_id": "one"}
    assert router.client.post("/v1/completions", json=body).status_code == 200
    assert found["openapi"] == "3.1.0"
    for path, methods in found["paths"].items():
        for method, operation in methods.items():
            names = {"{model_id}": "stand-in", "{name}": "one", "{file}": "main.js"}
            for name, value in names.items():
                path = path.replace(name, value)
            with router.client.stream(method, path) as answer:  # one of them has no end
                pass
            assert answer.status_code == (400 if "requestBody" in operation else 200), f"{method} {path}"
            kind = answer.headers["content-type"].partition(";")[0]
            assert kind in operation["responses"]["200"]["content"]


def test_bodies_are_those_that_are_checked(found: dict[str, Any]) -> None:
    schemas = found["components"]["schemas"]
    named = str(found).split("#/components/schemas/")[1:]
    assert {name.partition("'")[0] for name in named} <= schemas.keys()
    chat = schemas["ChatBody"]
    assert chat["required"] == ["messages"]
    assert chat["properties"]["temperature"]["anyOf"][0]["maximum"] == 2
    assert chat["properties"]["audio"]["enum"] == [None, False, "", []]
    assert "additionalProperties" not in chat
    assert "security" not in found["paths"]["/v1/models"]["get"]


def test_a_router_with_a_key_says_so(folder: Path) -> None:
    with RouterInThread(folder, (), api_key="sk-1", strict_requests=True) as router:
        found = router.client.get("/openapi.json").json()
        assert found["security"] == [{"key": []}]
        assert found["components"]["schemas"]["ChatBody"]["additionalProperties"] is False
        for path, methods in found["paths"].items():
            if "get" in methods and path != "/ready":
                answer = router.client.get(path.replace("{model_id}", "stand-in").replace("{file}", "main.js"))
                is_open = methods["get"].get("security") == []
                assert answer.status_code == (200 if is_open else 401), path


# README says: "`/docs` shows it offline"
def test_the_page_takes_nothing_from_elsewhere(router: RouterInThread) -> None:
    answer = router.client.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert re.findall(r"(?:src|href)=\W*[^\s>]*", answer.text) == ['href="openapi.json"']
    assert "//" not in re.sub(r"<!DOCTYPE[^>]*>", "", answer.text), "an address of another server"
