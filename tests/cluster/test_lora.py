"""Adapters over HTTP, on one node and split: the tokens of merged weights, whatever else is in the batch."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tiny_adapters import merged, tiny_adapter
from waiting import wait_until

from real_cluster import RealCluster
from tandem import LLM, BeamSearchParams, LoRARequest, SamplingParams
from tiny_models import check_greedy, random_prompt, tiny_model

BASE = "llama"
SETTINGS = {"alice": {"rank": 4}, "bob": {"rank": 8, "use_rslora": True}, "carol": {"targets": ("q_proj", "v_proj")}}
LORA = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--lora-host-bytes", "1")
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters by name, and the base merged with each by "name merged"."""
    root, base = tmp_path_factory.mktemp("lora"), tiny_model(BASE)
    found = {}
    for seed, (name, settings) in enumerate(SETTINGS.items()):
        found[name] = tiny_adapter(root / name, base, seed, **settings)  # type: ignore[arg-type]
        found[f"{name} merged"] = merged(root / f"{name} merged", base, found[name])
    found[f"{BASE} merged"] = base
    return found


# On one node, `make test` asks for adapters' tokens in test_hf_models.py, and over HTTP in test_surface_parity.py.
@pytest.fixture(
    scope="module",
    params=[pytest.param((), marks=pytest.mark.slow), ("--prefill", "1", "--decode", "1", "--workers", "2")],
    ids=["single", "split"],
)
def cluster(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Iterator[RealCluster]:
    listed = [f"--lora-modules=alice={folders['alice']}", f"--lora-modules=bob={folders['bob']}"]
    with RealCluster(tiny_model(BASE), *LORA, *listed, *request.param) as running:
        yield running


def load(cluster: RealCluster, name: str, path: Path | str, **fields: object) -> tuple[int, str]:
    answer = cluster.client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path), **fields})
    return answer.status_code, answer.text


def unload(cluster: RealCluster, name: str) -> int:
    return cluster.client.post("/v1/unload_lora_adapter", json={"lora_name": name}).status_code


def names(cluster: RealCluster) -> list[str]:
    return [card["id"] for card in cluster.client.get("/v1/models").json()["data"]]


def test_a_mixed_batch_makes_the_tokens_of_merged_weights(cluster: RealCluster, folders: dict[str, Path]) -> None:
    """Three adapters, in two slots and with room for one in host memory, beside none; each asked thrice at a time."""
    assert load(cluster, "carol", folders["carol"])[0] == 200
    assert sorted(names(cluster)) == sorted([BASE, *SETTINGS])
    prompts = {name: [random_prompt(20 + 11 * i, seed=i) for i in range(3)] for name in (BASE, *SETTINGS)}
    asked = [(name, prompt) for name, of_name in prompts.items() for prompt in of_name]
    with ThreadPoolExecutor(len(asked)) as threads:
        made = list(threads.map(lambda each: cluster.tokens(each[1], NUM_TOKENS, model=each[0])[0], asked))
    for (name, prompt), tokens in zip(asked, made, strict=True):
        check_greedy(folders[f"{name} merged"], prompt, tokens, NUM_TOKENS)
    wait_until(lambda: cluster.counter("adapter_slot_loads") >= 3, "a status that counts three loads")
    assert unload(cluster, "carol") == 200
    cluster.wait_until_whole()


def test_no_block_of_one_adapter_is_anothers(cluster: RealCluster, folders: dict[str, Path]) -> None:
    prompt = random_prompt(80, seed=9)
    for name in (BASE, "alice", "bob"):
        for cached in (0, 64):
            answer = cluster.complete(prompt, max_tokens=NUM_TOKENS, model=name).json()
            assert answer["model"] == name
            check_greedy(folders[f"{name} merged"], prompt, answer["choices"][0]["token_ids"], NUM_TOKENS)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached, name


def test_costs_say_where_an_adapter_would_have_to_be_read(cluster: RealCluster) -> None:
    """There is host memory for one, the latest."""

    def reading(name: str) -> list[bool]:
        asked = {"model": name, "prompt": random_prompt(9, seed=1), "max_tokens": 2}
        [prompt] = cluster.client.post("/explain", json=asked).json()["prompts"]
        return [node["adapter_s"] > 0 for node in prompt["nodes"]]

    for last, other in (("alice", "bob"), ("bob", "alice")):
        cluster.tokens(random_prompt(300, seed=8), 2, model=last)
        wait_until(lambda last=last: not all(reading(last)), "a node that holds it")  # type: ignore[misc]
        wait_until(lambda other=other: any(reading(other)), "a node that has let go of it")  # type: ignore[misc]
    assert not any(reading(BASE))


def test_samples_of_a_prompt_and_conversations_take_their_adapter(
    cluster: RealCluster, folders: dict[str, Path]
) -> None:
    prompt = random_prompt(21, seed=4)
    for tokens in cluster.tokens(prompt, NUM_TOKENS, model="bob", n=3):
        check_greedy(folders["bob merged"], prompt, tokens, NUM_TOKENS)
    said = cluster.client.post("/tokenize", json={"model": "alice", "prompt": "hello"})
    assert said.status_code == 200


def test_calls_from_python_name_and_load_adapters(cluster: RealCluster, folders: dict[str, Path]) -> None:
    prompt, greedy = random_prompt(25, seed=6), SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    requests = {
        "alice": LoRARequest("alice"),
        "carol": LoRARequest("from python", 1, str(folders["carol"])),
        "bob": LoRARequest("from python", 1, str(folders["bob"])),
        BASE: None,
    }
    with LLM(url=cluster.url) as llm:
        for name, request in requests.items():
            [output] = llm.generate([prompt], greedy, lora_request=request, use_tqdm=False)
            check_greedy(folders[f"{name} merged"], prompt, output.outputs[0].token_ids, NUM_TOKENS)
        beams = llm.beam_search([prompt], BeamSearchParams(beam_width=2, max_tokens=4), lora_request=requests["alice"])
        assert len(beams[0].sequences) == 2
    assert unload(cluster, "from python") == 200


def test_an_adapter_comes_and_goes_while_it_serves(cluster: RealCluster, folders: dict[str, Path]) -> None:
    prompt = random_prompt(30, seed=5)
    assert cluster.complete(prompt, model="dave").status_code == 404
    assert load(cluster, "dave", folders["carol"])[0] == 200
    assert load(cluster, "dave", folders["carol"])[0] == 400
    with cluster.client.stream(
        "POST",
        "/v1/completions",
        json={"model": "dave", "prompt": prompt, "max_tokens": 200, "stream": True, "ignore_eos": True},
    ) as running:
        lines = running.iter_lines()
        next(lines)
        assert unload(cluster, "dave") == 200
        assert cluster.complete(prompt, model="dave").status_code == 404
        events = [line for line in lines if line]
    assert events[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in events[-2], "it finishes with the adapter with which it began"
    assert load(cluster, "dave", folders["bob"], load_inplace=True)[0] == 200
    check_greedy(folders["bob merged"], prompt, cluster.tokens(prompt, NUM_TOKENS, model="dave")[0], NUM_TOKENS)
    assert unload(cluster, "dave") == 200
    assert unload(cluster, "dave") == 404


def test_wrong_adapters_are_refused_in_words(cluster: RealCluster, folders: dict[str, Path], tmp_path: Path) -> None:
    base = tiny_model(BASE)
    pickled = tmp_path / "pickled"
    shutil.copytree(folders["alice"], pickled)
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    torn = tmp_path / "torn"
    shutil.copytree(folders["alice"], torn)
    whole = (torn / "adapter_model.safetensors").read_bytes()
    (torn / "adapter_model.safetensors").write_bytes(whole[:-7])
    cases: dict[str, tuple[Path | str, str]] = {
        "missing": (tmp_path / "nowhere", "no folder"),
        "pickled": (pickled, "pickle"),
        "torn": (torn, "truncated"),
        "dora": (tiny_adapter(tmp_path / "dora", base, use_dora=True), "use_dora"),
        "other": (tiny_adapter(tmp_path / "other", tiny_model("llama_one_kv_head")), "another"),
        "high": (tiny_adapter(tmp_path / "high", base, rank=9), "--max-lora-rank"),
        BASE: (folders["alice"], "the model itself"),
    }
    before = names(cluster)
    for name, (path, words) in cases.items():
        status, text = load(cluster, name, path)
        assert (status, words in text) == (400, True), text
    assert names(cluster) == before
    assert cluster.tokens(random_prompt(20, seed=1), 2, model="alice")
    cluster.wait_until_whole()


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["tandem", "transformers"])
def test_ranks_share_out_adapters(impl: str, folders: dict[str, Path]) -> None:
    listed = [f"--lora-modules={name}={folders[name]}" for name in SETTINGS]
    with RealCluster(tiny_model(BASE), *LORA, *listed, "--tensor-parallel-size", "2", "--model-impl", impl) as running:
        for index, name in enumerate((*SETTINGS, BASE, *SETTINGS)):
            prompt = random_prompt(30, seed=index)
            check_greedy(folders[f"{name} merged"], prompt, running.tokens(prompt, 8, model=name)[0], 8)
