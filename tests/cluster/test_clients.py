"""Clients that people have, against a split cluster; those that aren't installed are left out. docs/clients.md tells
what they showed."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pydantic
import pytest
from documented import blocks
from router_in_thread import RouterInThread
from scripted_model import SCRIPTS, make_scripted_model

from in_process_cluster import Node, node_options

pytestmark = pytest.mark.slow
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it looks for a newer one on the Internet
DEMO = Path(__file__).resolve().parents[2] / "deploy" / "demo_model"
ASKED: list[Any] = [{"role": "user", "content": "What is two and two?"}]
WEATHER = {"city": 'Paris, "F"', "days": [1, 2]}
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
ROWS = [
    {"question": "def read_lines(", "choices": ["path):", "class", "import"], "answer": 0},
    {"question": "import", "choices": [" os", " banana", " ::"], "answer": 0},
    {"question": "Return a new", "choices": [" string", " def", " x!"], "answer": 0},
]


class Person(pydantic.BaseModel):
    """Someone, whose name ends even where the model doesn't."""

    name: Annotated[str, pydantic.Field(max_length=6)]
    age: Annotated[int, pydantic.Field(ge=0, le=99)]


def split(folder: Path) -> Iterator[RouterInThread]:
    nodes = [Node(node_options(role, folder)) for role in ("prefill", "decode")]
    addresses = tuple(node.info.control_address for node in nodes)
    with RouterInThread(folder, addresses, local_tail_tokens=0, enable_tokenizer_info_endpoint=True) as router:
        yield router.wait_ready()
    for node in nodes:
        node.stop()


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder, _ = make_scripted_model(tmp_path_factory.mktemp("models") / "scripted")
    for router in split(folder):
        yield f"{router.url}/v1"


@pytest.fixture(scope="module")
def demo() -> Iterator[str]:
    for router in split(DEMO):
        yield f"{router.url}/v1"


def says(script: str) -> dict[str, Any]:
    return {"chat_template_kwargs": {"script": script}}


def test_litellm(scripted: str) -> None:
    litellm = pytest.importorskip("litellm")
    fields: dict[str, Any] = {"model": "openai/scripted", "api_base": scripted, "api_key": "none"}
    answer = litellm.completion(messages=ASKED, n=2, logprobs=True, top_logprobs=1, seed=1, **fields)
    assert [choice.message.content for choice in answer.choices] == [SCRIPTS["hello"]] * 2
    chunks = litellm.completion(messages=ASKED, stream=True, **fields)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == SCRIPTS["hello"]
    called = litellm.completion(messages=ASKED, tools=[TOOL], extra_body=says("call"), **fields).choices[0].message
    assert json.loads(called.tool_calls[0].function.arguments) == WEATHER
    assert called.reasoning_content == "I need both."
    said = litellm.text_completion(**{**fields, "model": "text-completion-openai/scripted"}, prompt="x", max_tokens=3)
    assert said.usage.completion_tokens == 3
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(messages=ASKED, temperature=3.0, **fields)


def test_the_settings_of_the_page_are_those_that_clients_need(scripted: str) -> None:
    (block,) = blocks("python", "docs/clients.md")
    num_run = 0
    for line in block.text.splitlines():
        with contextlib.suppress(ImportError):
            names = {name: importlib.import_module(name) for name in re.findall(r"(\w+)\.\w+\(", line)}
            text = line.replace("http://HOST:8000/v1", scripted).replace("NAME", "scripted")
            made = eval(text, {**names, "messages": ASKED})
            if "ChatOpenAI" in line:
                assert made.invoke("What?").text == SCRIPTS["hello"]
            elif "instructor" in line:
                fields: dict[str, Any] = {"model": "scripted", "messages": ASKED, "extra_body": says("think")}
                asked = made.chat.completions.create(**fields, response_model=Person, max_retries=0, max_tokens=300)
                assert isinstance(asked, Person)
            else:
                assert made.choices[0].message.content == SCRIPTS["hello"]
            num_run += 1
    if not num_run:
        pytest.skip("none of the three is installed")


def test_litellm_responses(scripted: str) -> None:
    litellm = pytest.importorskip("litellm")
    pytest.importorskip("mcp")  # litellm's own responses need it
    fields = {"model": "openai/scripted", "api_base": scripted, "api_key": "none", "input": "What?"}
    assert litellm.responses(**fields).output[0].content[0].text == SCRIPTS["hello"]
    kinds = [str(event.type.value) for event in litellm.responses(**fields, stream=True)]
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")


def test_langchain(scripted: str) -> None:
    langchain = pytest.importorskip("langchain_openai")
    fields = {"base_url": scripted, "api_key": "none", "model": "scripted"}
    for more in ({}, {"use_responses_api": True}):
        chat = langchain.ChatOpenAI(**fields, **more)
        assert chat.invoke("What?").text == SCRIPTS["hello"]
        assert "".join(part.text for part in chat.stream("What?")) == SCRIPTS["hello"]
        assert [answer.text for answer in chat.batch(["a", "b"])] == [SCRIPTS["hello"]] * 2
        caller = langchain.ChatOpenAI(**fields, **more, extra_body=says("call")).bind_tools([TOOL])
        calls = caller.invoke("What?").tool_calls
        assert [(call["name"], call["args"]) for call in calls] == [("get_weather", WEATHER), ("get_time", {})]
    assert len(langchain.OpenAI(**fields, max_tokens=3).generate(["a", "b"]).generations) == 2


# mode -> the script of an answer that the grammar leaves its say
MODES = {
    "MD_JSON": "json", "JSON": "object", "JSON_SCHEMA": "think",
    "TOOLS": "think", "TOOLS_STRICT": "think", "RESPONSES_TOOLS": "think",
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_instructor(scripted: str, mode: str) -> None:
    instructor = pytest.importorskip("instructor")
    import openai

    client = openai.OpenAI(base_url=scripted, api_key="none")
    asker = instructor.from_openai(client, mode=instructor.Mode[mode])
    fields = {"model": "scripted", "response_model": Person, "messages": ASKED, "max_retries": 0, "temperature": 0}
    found = asker.chat.completions.create(**fields, max_tokens=300, extra_body=says(MODES[mode]))
    assert isinstance(found, Person)


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_langchain_structured_output(scripted: str, method: str, api: str) -> None:
    langchain = pytest.importorskip("langchain_openai")
    script = "object" if method == "json_mode" else "think"
    fields: dict[str, Any] = {"model": "scripted", "temperature": 0, "max_tokens": 300, "extra_body": says(script)}
    chat = langchain.ChatOpenAI(base_url=scripted, api_key="none", use_responses_api=api == "responses", **fields)
    for strict in ({}, {"strict": True}) if method != "json_mode" else ({},):
        asker = chat.with_structured_output(Person, method=method, **strict)
        found = asker.invoke("Who? In JSON.")
        assert isinstance(found, Person)
        assert list(asker.stream("Who? In JSON."))[-1] == found
    raw = chat.with_structured_output(Person, method=method, include_raw=True).invoke("Who? In JSON.")
    assert (raw["parsed"], raw["parsing_error"]) == (found, None)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_guidellm(demo: str, tmp_path: Path, path: str) -> None:
    pytest.importorskip("guidellm")
    server = f"kind=openai_http,target={demo.removesuffix('/v1')},model=demo_model,request_format=/v1/{path}"
    command = [
        *(sys.executable, "-m", "guidellm", "run", "--backend", server, "--tokenizer", f"kind=hf_auto,model={DEMO}"),
        *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=4"),
        *("--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6"),
    ]
    environ = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    [benchmark] = json.loads((tmp_path / "benchmarks.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (6, 0)


def tasks(folder: Path) -> list[dict[str, Any]]:
    """A choice by likelihood, greedy text, and the perplexity of texts."""
    data = folder / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, ROWS)))
    of_all = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
    asks = {**of_all, "doc_to_text": "{{question}}", "target_delimiter": ""}
    greedy = {"until": ["\n\n\n"], "max_gen_toks": 12, "do_sample": False, "temperature": 0}
    choice = {"doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}", "metric_list": [{"metric": "acc"}]}
    text = {"doc_to_target": "x", "generation_kwargs": greedy, "metric_list": [{"metric": "exact_match"}]}
    whole = {"doc_to_text": "", "doc_to_target": "{{question}}", "metric_list": [{"metric": "bits_per_byte"}]}
    return [
        {"task": "choice", "output_type": "multiple_choice", **asks, **choice},
        {"task": "text", "output_type": "generate_until", **asks, **text},
        {"task": "likelihood", "output_type": "loglikelihood_rolling", **of_all, **whole},
    ]


def test_lm_eval_has_the_numbers_of_transformers(demo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm_eval = pytest.importorskip("lm_eval")
    pytest.importorskip("accelerate")  # its own way to transformers needs it
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")

    def run(model: str, arguments: dict[str, Any], some: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        said = lm_eval.simple_evaluate(model, arguments, tasks=some, log_samples=True, bootstrap_iters=0, **more)
        return {
            name: [sample["resps"] for sample in sorted(samples, key=lambda sample: sample["doc_id"])]
            for name, samples in said["samples"].items()
        }

    shared = {"add_bos_token": True, "max_length": 2048}
    tokenizer = {"tokenizer": str(DEMO), "tokenizer_backend": "huggingface", "num_concurrent": 2, **shared}
    asked = {"model": "demo_model", "base_url": f"{demo}/completions"}
    ours = run("local-completions", {**asked, **tokenizer}, tasks(tmp_path))
    hf = run("hf", {"pretrained": str(DEMO), "dtype": "float32", **shared}, tasks(tmp_path), device="cpu")
    assert ours["text"] == hf["text"]
    assert [[pair[0][1] for pair in row] for row in ours["choice"]] == [
        [pair[0][1] for pair in row] for row in hf["choice"]
    ]
    for name in ("choice", "likelihood"):
        for mine, theirs in zip(flat(ours[name]), flat(hf[name]), strict=True):
            assert mine == pytest.approx(theirs, abs=1e-3)
    plain = {**asked, "num_concurrent": 2, "max_length": 2048}  # from there it never adds the first token
    remote = run("local-completions", {**plain, "tokenizer_backend": "remote"}, tasks(tmp_path))
    local = {"tokenizer": str(DEMO), "tokenizer_backend": "huggingface"}
    beside = run("local-completions", {**plain, **local}, tasks(tmp_path))
    assert remote["text"] == beside["text"]
    assert list(flat(remote["choice"])) == pytest.approx(list(flat(beside["choice"])), abs=1e-3)
    asked["base_url"] = f"{demo}/chat/completions"
    chat = run("local-chat-completions", asked, tasks(tmp_path)[1:2], apply_chat_template=True)
    assert chat["text"] == hf["text"]


def flat(found: Any) -> Iterator[float]:
    if isinstance(found, list | tuple):
        for each in found:
            yield from flat(each)
    else:
        yield float(found)
