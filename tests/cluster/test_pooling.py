"""Models that embed or score, on one node and split: the numbers of transformers, whoever is beside them in a batch."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from pooling_models import add_sentence_transformers, make_pooling_model
from router_in_thread import RouterInThread
from transformers import AutoModel, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from in_process_cluster import node_options
from tandem import LLM, errors
from tandem.engine.pooling.config import read_pooling_config
from tandem.node.pooling.process import PoolingProcess

TEXTS = ["the quick brown fox", "a lazy dog reads about cats in paris today and jumps", "paris", "the fox " * 12]
QUERY = "cats in paris"
ALONE, SPLIT = ("unified",), ("prefill", "decode")
Values = Any


@contextmanager
def serve(folder: Path, roles: tuple[str, ...]) -> Iterator[RouterInThread]:
    config = read_pooling_config(folder)
    assert config is not None
    processes = [PoolingProcess(node_options(role, folder), folder, config) for role in roles]
    threads = [threading.Thread(target=process.run, daemon=True) for process in processes]
    for process, thread in zip(processes, threads, strict=True):
        process.start()
        thread.start()
    addresses = tuple(process.info.control_address for process in processes)
    with RouterInThread(folder, addresses) as router:
        yield router.wait_ready()
        router.wait_idle()
    for process, thread in zip(processes, threads, strict=True):
        process.begin_drain()
        thread.join(60)
        assert not thread.is_alive()
        process.logic.check_integrity()
        assert process.logic.is_empty
    if len(processes) > 1:
        assert all(process.logic.book.num_accepted for process in processes), "one of them had nothing to do"


def tokenizer_of(folder: Path) -> Any:
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), pad_token="[PAD]")


def expected_vectors(folder: Path, mode: str, normalize: bool) -> Values:
    model, tokenizer = AutoModel.from_pretrained(folder, dtype=torch.float32).eval(), tokenizer_of(folder)
    found = []
    for text in TEXTS:  # one at a time: nothing is padded
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        with torch.inference_mode():
            hidden = model(ids).last_hidden_state[0]
        means = {"cls_token": hidden[0], "mean_tokens": hidden.mean(0), "max_tokens": hidden.amax(0)}
        vector = means.get(mode, hidden[-1])
        found.append((torch.nn.functional.normalize(vector, dim=0) if normalize else vector).numpy())
    return np.stack(found)


def vector_of(said: Any) -> Values:
    return np.frombuffer(base64.b64decode(said), "<f4") if isinstance(said, str) else said


@pytest.mark.parametrize(
    ("kind", "mode", "normalize"),
    [
        ("bert", "mean_tokens", True),
        ("xlm-roberta", "cls_token", True),
        ("modernbert", "max_tokens", False),
        ("qwen3", "lasttoken", True),
        ("mistral", "", True),
    ],
)
def test_embeddings_are_those_of_transformers(kind: str, mode: str, normalize: bool, tmp_path: Path) -> None:
    folder = make_pooling_model(tmp_path / "model", kind)
    if mode:
        add_sentence_transformers(folder, mode, normalize)
    wanted = expected_vectors(folder, mode, normalize)
    for roles in (ALONE, SPLIT):
        with serve(folder, roles) as router:
            with openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0) as client:
                for encoding in ("float", "base64"):  # its own default is base64
                    answer = client.embeddings.create(model="model", input=TEXTS, encoding_format=encoding)
                    found = [vector_of(row.embedding) for row in answer.data]
                    np.testing.assert_allclose(np.array(found), wanted, atol=2e-5)
                short = client.embeddings.create(model="model", input=TEXTS, dimensions=16)
                cut = wanted[:, :16]
                cut = cut / np.linalg.norm(cut, axis=1, keepdims=True) if normalize else cut
                np.testing.assert_allclose([row.embedding for row in short.data], cut, atol=2e-5)
                one = client.embeddings.create(model="model", input=tokenizer_of(folder)(TEXTS[0])["input_ids"])
                np.testing.assert_allclose(one.data[0].embedding, wanted[0], atol=2e-5)
                assert one.usage.total_tokens == one.usage.prompt_tokens == 6
            with LLM(url=router.url) as llm:
                outputs = llm.embed(TEXTS)
                np.testing.assert_allclose([output.outputs.embedding for output in outputs], wanted, atol=2e-5)


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_scores_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    folder = make_pooling_model(tmp_path / "model", kind, scores=True)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer, wanted = tokenizer_of(folder), []
    for text in TEXTS:
        said = tokenizer(QUERY, text, return_token_type_ids=kind == "bert")
        fields = {name: torch.tensor([value]) for name, value in said.items()}
        with torch.inference_mode():
            wanted.append(float(torch.sigmoid(model(**fields).logits)[0, 0]))
    order = sorted(range(len(TEXTS)), key=lambda i: -wanted[i])
    for roles in (ALONE, SPLIT):
        with serve(folder, roles) as router:
            body = {"text_1": QUERY, "text_2": TEXTS}
            data = router.client.post("/score", json=body).json()["data"]
            np.testing.assert_allclose([row["score"] for row in data], wanted, atol=2e-5)
            body = {"query": QUERY, "documents": TEXTS, "top_n": 3}
            results = router.client.post("/v1/rerank", json=body).json()["results"]
            assert [row["index"] for row in results] == order[:3]
            assert results[0]["document"]["text"] == TEXTS[order[0]]
            with LLM(url=router.url) as llm:
                assert [output.outputs.score for output in llm.score(QUERY, TEXTS)] == pytest.approx(wanted, abs=2e-5)


def test_what_a_model_does_not_do_is_refused_by_its_kind(tmp_path: Path) -> None:
    folder = make_pooling_model(tmp_path / "model", "bert")
    with serve(folder, ALONE) as router:
        for path, body in (
            ("/v1/completions", {"prompt": "a"}),
            ("/score", {"text_1": "a", "text_2": "b"}),
        ):
            error = router.client.post(path, json=body).json()["error"]
            assert "model makes embeddings of texts: ask /v1/embeddings" in error["message"]
        refused: list[tuple[dict[str, Any], str]] = [
            ({"input": "fox " * 47}, "input"),
            ({"input": []}, "input"),
            ({"input": [99]}, "input"),
            ({"input": "a", "dimensions": 33}, "dimensions"),
            ({"input": "a", "dimensions": 0}, "dimensions"),
            ({"input": "a fox", "truncate_prompt_tokens": 1}, "truncate_prompt_tokens"),
            ({"input": "a fox", "normalize": False}, "normalize"),
            ({"input": "a fox", "use_activation": True}, "use_activation"),
            ({"input": "a fox", "encoding_format": "base64", "embed_dtype": "float16"}, "embed_dtype"),
            ({"input": "a fox", "encoding_format": "base64", "endianness": "big"}, "endianness"),
        ]
        for body, field in refused:
            answer = router.client.post("/v1/embeddings", json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), body
        said = {"normalize": None, "embed_dtype": "float32", "endianness": "native"}
        assert router.client.post("/v1/embeddings", json={"input": "fox " * 46, **said}).status_code == 200
        [card] = router.client.get("/v1/models").json()["data"]
        assert (card["max_model_len"], card["task"]) == (48, "embed")
        assert router.client.post("/tokenize", json={"prompt": "a"}).json()["max_model_len"] == 48
        far_too_long = router.client.post("/v1/embeddings", json={"input": "fox " * 999}).json()["error"]["message"]
        assert far_too_long.endswith("the model takes 48"), "there is no output to be included"
        with LLM(url=router.url) as llm, pytest.raises(errors.InvalidRequestError, match="makes embeddings"):
            llm.generate("a", use_tqdm=False)


@pytest.mark.parametrize(
    ("option", "given"),
    [
        ("--tensor-parallel-size", {"tensor_parallel_size": 2}),
        ("--compile", {"compile": True}),
        ("--leaning", {"leaning": "decode"}),
    ],
)
def test_options_that_would_do_nothing_are_refused_by_name(option: str, given: dict[str, Any], tmp_path: Path) -> None:
    folder = make_pooling_model(tmp_path, "bert")
    config = read_pooling_config(folder)
    assert config is not None
    with pytest.raises(errors.ConfigError, match=rf"^{option} .* a model that pools, .*: leave it out"):
        PoolingProcess(node_options("unified", folder, **given), folder, config)


def test_folders_that_pool_otherwise_say_so(tmp_path: Path) -> None:
    two = make_pooling_model(tmp_path / "two", "bert", scores=True, num_labels=2)
    with pytest.raises(errors.ConfigError, match="2 labels"):
        read_pooling_config(two)
    named = read_pooling_config(make_pooling_model(tmp_path / "named", "mistral"))
    assert named is not None
    assert named.embedding_sizes == (32,)
    generates = make_pooling_model(tmp_path / "generates", "qwen3")
    assert read_pooling_config(generates) is None, "nothing says that it embeds"
    add_sentence_transformers(generates, "lasttoken", True)
    assert (embeds := read_pooling_config(generates)) is not None
    assert (embeds.pooling, embeds.normalize, embeds.embedding_sizes) == ("lasttoken", True, (32, 8, 16))
    own = json.loads((generates / "config.json").read_text()) | {"auto_map": {"AutoModel": "modeling.Own"}}
    (generates / "config.json").write_text(json.dumps(own))
    with pytest.raises(errors.ConfigError, match="code of its own"):
        read_pooling_config(generates)
    odd = make_pooling_model(tmp_path / "odd", "bert")
    add_sentence_transformers(odd, "weightedmean_tokens", False)
    with pytest.raises(errors.ConfigError, match=r"config.json: pooling by nothing .* cls, mean, max, lasttoken"):
        read_pooling_config(odd)
