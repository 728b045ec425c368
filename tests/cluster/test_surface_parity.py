"""Each feature of the HTTP surface, asked of one node and of a split cluster: the same answers, whole and streamed.

What the answers should be is held elsewhere (test_chat, test_responses, test_structured, test_beams, test_lora);
`LLM` and `AsyncLLM` run on both in test_python_api, images and sounds in test_media_http.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from router_in_thread import RouterInThread
from tiny_adapters import tiny_adapter
from waiting import PATIENCE_S, wait_until

import tandem.deploy
from in_process_cluster import Node, node_options
from tandem.engine.contracts.config import LoraOptions

DEMO = Path(tandem.deploy.__file__).parent / "demo_model"
TEMPLATE = (  # its words <think> and <tool_call> say how a model of it writes
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{# <tool_call> #}"
    "{{ tools | tojson if tools else '' }}"
    "{% if add_generation_prompt %}{{ '<think>' if enable_thinking else 'def ' }}{% endif %}"
)
PROMPT = "def read_lines(path):\n    " * 6  # some blocks, so that a prefill node has KV to hand over
SAY: list[Any] = [{"role": "user", "content": PROMPT}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("get_weather", "get_time")
]
ITEM_TOOLS = [{"type": "function", **tool["function"]} for tool in TOOLS]
FORM = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}],
    "triggers": ["<a>"],
}
NAMED = {"type": "function", "function": {"name": "get_time"}}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "list of prompts": {"prompt": [PROMPT, "Return a new"]},
    "token ids": {"prompt": [[5, 6, 7] * 12, [0, 9]]},
    "n": {"n": 3, "temperature": 0.9, "seed": 5},
    "best_of": {"n": 1, "best_of": 3, "temperature": 0.9, "seed": 5},
    "beams": {"n": 2, "use_beam_search": True, "beam_width": 3, "length_penalty": 0.5},
    "logprobs": {"logprobs": 3, "echo": True, "prompt_logprobs": 1, "return_token_ids": True},
    "stop": {"stop": ["return", "\n\n"], "include_stop_str_in_output": True, "max_tokens": 24},
    "sampling": {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 3, "repetition_penalty": 1.1},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {"7": -5}, "min_tokens": 3},
    "tokens": {"allowed_token_ids": list(range(40, 90)), "bad_words": [" self"]},
    "regex": {"structured_outputs": {"regex": "[a-z]{3}-[0-9]{2}"}},
    "choice": {"structured_outputs": {"choice": ["yes", "no"]}},
    "grammar": {"guided_grammar": 'root ::= "a" | "b" root', "max_tokens": 9},
    "schema": {"structured_outputs": {"json": SCHEMA}, "max_tokens": 60, "n": 2, "seed": 1, "temperature": 0.9},
    "schema by beams": {"guided_json": SCHEMA, "use_beam_search": True, "beam_width": 2, "max_tokens": 60},
    "truncation": {"truncate_prompt_tokens": 20, "cache_salt": "s", "request_id": "mine", "priority": 1},
    "timeout": {"timeout": 100, "ttft_target_ms": 60_000, "user": "me"},
    "adapter": {"model": "alice"},
    "suffix": {"suffix": "end"},
    "no such model": {"model": "bob"},
    "too long": {"max_tokens": 5000},
    "unknown": {"temprature": 1},
}
CHATS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "n": {"n": 2, "temperature": 0.9, "seed": 5, "logprobs": True, "top_logprobs": 2},
    "reasoning": {"chat_template_kwargs": {"enable_thinking": True}},
    "continued": {
        "messages": [*SAY, {"role": "assistant", "content": "def "}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "tools": {"tools": TOOLS},
    "tools, none": {"tools": TOOLS, "tool_choice": "none"},
    "tools, required": {"tools": TOOLS, "tool_choice": "required", "max_tokens": 90},
    "tools, one": {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 90},
    "tools, named": {"tools": TOOLS, "tool_choice": NAMED, "max_tokens": 90, "n": 2, "seed": 2, "temperature": 0.9},
    "json_object": {"response_format": {"type": "json_object"}},
    "json_schema": {"response_format": FORM, "max_tokens": 60},
    "structural_tag": {"response_format": TAG},
    "beams": {"use_beam_search": True, "n": 2},
    "adapter": {"model": "alice"},
    "audio": {"modalities": ["audio"]},
    "image": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
}
RESPONSES: dict[str, dict[str, Any]] = {
    "text": {"instructions": "Be brief.", "top_logprobs": 1},
    "items": {"input": [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": "def "}, *SAY]},
    "reasoning": {"chat_template_kwargs": {"enable_thinking": True}},
    "tools": {"tools": ITEM_TOOLS, "tool_choice": "required", "max_output_tokens": 90},
    "schema": {
        "text": {"format": {"type": "json_schema", "name": "person", "schema": SCHEMA}},
        "max_output_tokens": 60,
    },
    "stored": {"previous_response_id": "resp_1"},
}
OTHERS: dict[str, dict[str, Any]] = {
    "/tokenize": {"messages": SAY, "tools": TOOLS},
    "/detokenize": {"tokens": [5, 6, 7]},
    "/v1/embeddings": {"input": "a"},
    "/score": {"text_1": "a", "text_2": "b"},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/v1/batches": {},
}


class Servers:
    """One node, and a prefill and a decode node; a router of its own in front of each kind."""

    def __init__(self, stack: ExitStack, adapter: Path) -> None:
        lora = LoraOptions(enable_lora=True, max_loras=1, max_lora_rank=8, lora_modules=(f"alice={adapter}",))
        self.nodes = {}
        for role in ("unified", "prefill", "decode"):
            self.nodes[role] = node = Node(node_options(role, DEMO, lora=lora))
            stack.callback(node.stop)
        addresses = {role: node.info.control_address for role, node in self.nodes.items()}
        self.routers = []
        for roles in (["unified"], ["prefill", "decode"]):
            router = RouterInThread(
                DEMO, tuple(addresses[role] for role in roles), local_tail_tokens=0, lora=lora,
                chat_template=TEMPLATE, tool_call_parser="hermes", reasoning_parser="qwen3",
            )  # fmt: skip
            self.routers.append(stack.enter_context(router).wait_ready())
            wait_until(lambda router=router: "alice" in router.client.get("/v1/models").text, "the adapter")

    def answer(self, index: int, path: str, body: dict[str, Any]) -> list[Any]:
        """What the node (0) or the cluster (1) says, but for what no two answers share."""
        answer = self.routers[index].client.post(path, json=body)
        raw = gathered(answer.text) if body.get("stream") and answer.status_code == 200 else answer.json()
        return [answer.status_code, comparable(raw)]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    adapter = tiny_adapter(tmp_path_factory.mktemp("lora") / "alice", DEMO)
    with ExitStack() as stack:
        yield Servers(stack, adapter)


def gathered(stream: str) -> dict[str, Any]:
    """The texts of a stream by where they belong, and its ends: how it is cut into events is nobody's to say."""
    said: dict[str, Any] = {}

    def walk(value: Any, place: str) -> None:
        if isinstance(value, dict):
            place += f"/{value.get('index', value.get('output_index', ''))}"
            for name, inner in value.items():
                walk(inner, f"{place}.{name}")
        elif isinstance(value, list):
            for inner in value:
                walk(inner, place)
        elif isinstance(value, str) and place.endswith(
            (".text", ".content", ".arguments", ".delta", ".reasoning_content")
        ):
            said[place] = said.get(place, "") + value
        elif place.endswith((".finish_reason", ".name")) and value is not None:
            said.setdefault(place, []).append(value)

    lines = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: ")]
    for line in lines:
        if line != "[DONE]":
            walk(json.loads(line), "")
    said["last"] = lines[-1] == "[DONE]"
    return said


OWN = {"id", "created", "created_at", "completed_at", "cached_tokens", "call_id", "item_id", "response_id"}


def comparable(value: Any) -> Any:
    """Without what is an answer's own, and with floats that are equal when they are near."""
    if isinstance(value, dict):
        return {name: comparable(inner) for name, inner in value.items() if name not in OWN}
    if isinstance(value, list):
        return [comparable(inner) for inner in value]
    return Near(value) if isinstance(value, float) else value


class Near(float):
    """Equal to what is within a thousandth: batches add up in other orders."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and abs(float(self) - float(other)) < 1e-3

    def __ne__(self, other: object) -> bool:
        return not self == other


def cases() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for name, fields in COMPLETIONS.items():
        yield name, "/v1/completions", {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, **fields}
    for name, fields in CHATS.items():
        yield name, "/v1/chat/completions", {"messages": SAY, "max_tokens": 8, "temperature": 0, **fields}
    for name, fields in RESPONSES.items():
        yield name, "/v1/responses", {"input": PROMPT, "max_output_tokens": 8, "temperature": 0, **fields}
    for path, body in OTHERS.items():
        yield "it", path, body


@pytest.mark.timeout(600)
@pytest.mark.parametrize("stream", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["whole", "streamed"])
def test_one_node_and_a_split_cluster_answer_alike(servers: Servers, stream: bool) -> None:
    asked = []
    for name, path, body in cases():
        if not stream:
            asked.append((f"{path}: {name}", path, body))
        elif path not in OTHERS and not {"best_of", "use_beam_search", "echo"} & body.keys():
            asked.append((f"{path}: {name}", path, {**body, "stream": True}))
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda case: servers.answer(case[0], *case[1][1:]), product((0, 1), asked)))
    names = [name for name, _, _ in asked]
    whole, split = (dict(zip(names, part, strict=True)) for part in (found[: len(asked)], found[len(asked) :]))
    for name in names:
        assert whole[name] == split[name], name
    refused = {name for name, (status, _) in whole.items() if status != 200}
    assert refused == whole.keys() & {
        "/v1/completions: suffix", "/v1/completions: no such model", "/v1/completions: too long",
        "/v1/completions: unknown", "/v1/chat/completions: audio", "/v1/chat/completions: image",
        "/v1/responses: stored", "/v1/embeddings: it", "/score: it", "/rerank: it", "/v1/batches: it",
    }  # fmt: skip
    assert whole["/v1/completions: adapter"] != whole["/v1/completions: greedy"]
    assert servers.nodes["decode"].process.logic.handoffs.sink.counters.commits >= len(CHATS)
    for router in servers.routers:
        router.wait_idle()


def test_a_client_that_leaves_ends_its_request_on_both(servers: Servers) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1500, "stream": True, "ignore_eos": True}
    for router in servers.routers:
        with router.client.stream("POST", "/v1/completions", json=body) as answer:
            assert next(answer.iter_lines()).startswith("data: ")
        router.wait_idle()


def test_operators_see_and_drain_both(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.router.watching.desk.STORY_S", PATIENCE_S)
    body = {"prompt": f"{PROMPT}told", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    for index, (router, roles) in enumerate(zip(servers.routers, (("unified",), ("prefill", "decode")), strict=True)):
        nodes = [servers.nodes[role].info.node_id for role in roles]
        name = {"X-Request-Id": f"told-{index}"}
        assert router.client.post("/v1/completions", json=body, headers=name).status_code == 200
        (story,) = router.client.get(f"/admin/requests/told-{index}").json()["prompts"]
        assert (story["nodes"], story["output_tokens"], story["silent_nodes"]) == (nodes, 4, [])
        seen = {(moment["where"], moment["kind"]) for moment in story["moments"]}
        expected = {("router", "queue"), ("router", "first_token"), (nodes[0], "chunk"), (nodes[-1], "tokens")}
        if len(nodes) > 1:
            expected |= {(nodes[0], "push"), (nodes[1], "verify"), (nodes[1], "commit")}
        assert expected <= seen
        for moment in story["moments"]:
            assert 0 <= moment["at_s"] <= story["age_s"]
        for node in nodes:
            drained = router.client.post("/admin/drain", json={"node": node}).json()
            assert (drained["state"], "nothing can be served" in drained["warning"]) == ("draining", True)
            assert router.client.get("/ready").status_code == 503
            assert router.client.post("/admin/drain", json={"node": node, "undo": True}).json()["state"] == "serving"
        assert router.client.post("/v1/completions", json=body).status_code == 200
