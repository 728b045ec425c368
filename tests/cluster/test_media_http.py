"""Images and sounds as clients send them, over HTTP: on one node and split, and what is no image or sound."""

from __future__ import annotations

import base64
import io
import json
import struct
import threading
import wave
import zlib
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from documented import blocks
from PIL import Image
from router_in_thread import RouterInThread
from tiny_hf_models import TOWERS, tiny_hf_model
from tiny_media import PLACEHOLDER, MediaPrompt, check_media_greedy
from waiting import PATIENCE_S, wait_until

from in_process_cluster import Node, node_options
from tandem import LLM, SamplingParams, errors
from tandem.engine.contracts.config import MediaOptions
from tandem.engine.contracts.wire.media import MediaItem
from tiny_models import tiny_model

NUM_TOKENS = 6


def picture(seed: int = 0, size: tuple[int, int] = (40, 30), form: str = "PNG") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), np.uint8)
    Image.fromarray(pixels).save(out := io.BytesIO(), form)
    return out.getvalue()


def sound(seed: int = 0, seconds: float = 0.5, rate: int = 8000) -> bytes:
    with wave.open(out := io.BytesIO(), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(rate)
        noise = np.random.default_rng(seed).integers(-9999, 9999, 2 * int(seconds * rate))
        file.writeframes(noise.astype("<i2").tobytes())
    return out.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image_part(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data)}}


def sound_part(data: bytes) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}}


def asked(*parts: dict[str, Any] | str) -> list[Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [{"role": "system", "content": "Look."}, {"role": "user", "content": content}]


class Served:
    """A family's nodes: two with a router that splits, and one that is a service of its own."""

    def __init__(self, family: str, **options: Any) -> None:
        self.family, self.folder = family, tiny_hf_model(family)
        roles = ("prefill", "decode", "unified")
        self.nodes = [Node(node_options(role, self.folder, num_blocks=64, chunk=32)) for role in roles]
        addresses = [node.info.control_address for node in self.nodes]
        make = partial(RouterInThread, self.folder, local_tail_tokens=0, **options)
        self.split, self.alone = make(nodes=tuple(addresses[:2])), make(nodes=(addresses[2],))

    def __enter__(self) -> Served:
        for router in (self.split, self.alone):
            router.__enter__().wait_ready()
        return self

    def __exit__(self, *_: object) -> None:
        for router in (self.split, self.alone):
            router.__exit__()
        for node in self.nodes:
            node.stop()

    @property
    def num_encoded(self) -> list[float]:
        return [node.process.media.outputs.counters["media_encoded"] for node in self.nodes]

    def chat(self, router: RouterInThread, messages: list[Any], **fields: Any) -> Any:
        body = {"messages": messages, "temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, **fields}
        return router.client.post("/v1/chat/completions", json={**body, "return_token_ids": True})


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Answers of which nobody says how long they may be are short: random weights know no end."""
    short = tmp_path_factory.mktemp("short")
    (short / "generation_config.json").write_text(json.dumps({"max_new_tokens": 20}))
    media = MediaOptions(limit_mm_per_prompt="image=3", allowed_media_domains=("127.0.0.1", "localhost"))
    with Served("llava", media=media, generation_config=str(short)) as served:
        yield served


def item_of(served: Served, data: bytes) -> dict[str, np.ndarray]:
    """What transformers' own processor makes of it."""
    from transformers import AutoFeatureExtractor, AutoImageProcessor

    if served.family != "qwen2_audio":
        own = AutoImageProcessor.from_pretrained(served.folder, backend="pil")
        return dict(own(images=[Image.open(io.BytesIO(data))], return_tensors="np"))
    samples = np.frombuffer(data[44:], "<i2").reshape(-1, 2).astype(np.float32).mean(axis=1) / 32768
    own = AutoFeatureExtractor.from_pretrained(served.folder)
    made = own([samples], sampling_rate=16000, padding="max_length", return_attention_mask=True, return_tensors="np")
    return {"input_features": made["input_features"], "feature_attention_mask": made["attention_mask"]}


def prompt_of(served: Served, own_ids: list[int], contents: list[bytes]) -> MediaPrompt:
    """A prompt of which the runs of placeholders are these contents' spans."""
    starts = [i for i, t in enumerate(own_ids) if t == PLACEHOLDER and own_ids[i - 1] != PLACEHOLDER]
    assert len(starts) == len(contents)
    media = []
    for start, data in zip(starts, contents, strict=True):
        length = next(i for i in range(start, len(own_ids)) if own_ids[i] != PLACEHOLDER) - start
        media.append(MediaItem.of(start, length, "image", item_of(served, data)))
    return MediaPrompt(own_ids, tuple(media))


@pytest.mark.parametrize("family", TOWERS)
def test_answers_are_those_of_transformers(family: str, request: pytest.FixtureRequest) -> None:
    served = request.getfixturevalue("llava") if family == "llava" else Served(family).__enter__()
    try:
        make, part = (sound, sound_part) if family == "qwen2_audio" else (picture, image_part)
        contents = [make(1, rate=16000), make(2, rate=16000)] if make is sound else [make(1), make(2, (30, 60), "JPEG")]
        messages = asked("what is", part(contents[0]), "and what", part(contents[1]), "there?")
        before = served.num_encoded
        for router in (served.split, served.alone):
            answer = served.chat(router, messages, n=2).json()
            own_ids = answer["choices"][0]["prompt_token_ids"]
            assert answer["usage"]["prompt_tokens"] == len(own_ids)
            for choice in answer["choices"]:
                check_media_greedy(served.folder, prompt_of(served, own_ids, contents), choice["token_ids"], NUM_TOKENS)
        assert [now - then for now, then in zip(served.num_encoded, before, strict=True)] == [2, 0, 2], (
            "the prefill node encodes, once each; the decode node has their spans by the hand-off"
        )
        counted = served.alone.client.post("/tokenize", json={"messages": messages}).json()
        assert counted["tokens"] == own_ids
    finally:
        if family != "llava":
            served.__exit__()


def test_openais_client_and_both_apis_tell_pictures_apart(llava: Served) -> None:
    client = openai.OpenAI(base_url=f"{llava.split.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)
    texts = set()
    for seed in (3, 4):
        completion = client.chat.completions.create(
            model=llava.folder.name, messages=asked("a", image_part(picture(seed))), max_tokens=8, temperature=0
        )
        response = client.responses.create(
            model=llava.folder.name,
            input=[
                {"role": "system", "content": "Look."},
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "a"},
                        {"type": "input_image", "image_url": data_url(picture(seed)), "detail": "auto"},
                    ],
                },
            ],
            max_output_tokens=8,
            temperature=0,
        )
        assert response.output_text == completion.choices[0].message.content
        texts.add(response.output_text)
    assert len(texts) == 2


def test_the_program_of_the_page_is_answered(llava: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = blocks("python", "docs/multimodal.md")
    (tmp_path / "cat.png").write_bytes(picture(5))
    monkeypatch.chdir(tmp_path)
    client = openai.OpenAI(base_url=f"{llava.split.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)
    names: dict[str, Any] = {"client": client, "model": llava.folder.name}
    exec(block.text, names)
    assert names["answer"].usage.completion_tokens


def test_prompts_of_programs_hold_pictures(llava: Served) -> None:
    """`LLM.generate` with `multi_modal_data`, over one node and split; by text and by ids."""
    contents = [picture(5), picture(6)]
    opened = [Image.open(io.BytesIO(data)) for data in contents]
    greedy = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    for router in (llava.alone, llava.split):
        with LLM(url=router.url) as llm:
            [by_text] = llm.generate(
                {"prompt": "what is <image> beside <image>?", "multi_modal_data": {"image": opened}},
                greedy,
                use_tqdm=False,
            )
            own_ids, tokens = by_text.prompt_token_ids, by_text.outputs[0].token_ids
            check_media_greedy(llava.folder, prompt_of(llava, own_ids, contents), tokens, NUM_TOKENS)
            ids = [each for i, each in enumerate(own_ids) if each != PLACEHOLDER or own_ids[i - 1] != PLACEHOLDER]
            by_ids, swapped, text = llm.generate(
                [
                    {"prompt_token_ids": ids, "multi_modal_data": {"image": opened}},
                    {"prompt_token_ids": ids, "multi_modal_data": {"image": opened[::-1]}},
                    "what is there?",
                ],
                greedy,
                use_tqdm=False,
            )
            assert (by_ids.prompt_token_ids, by_ids.outputs[0].token_ids) == (own_ids, tokens)
            prompt = prompt_of(llava, own_ids, contents[::-1])
            check_media_greedy(llava.folder, prompt, swapped.outputs[0].token_ids, NUM_TOKENS)
            assert len(text.outputs[0].token_ids) == NUM_TOKENS
            for prompt, data, why in (
                ("a", {"image": opened}, "the text has 0 times <image>"),
                ("<image>", {"audio": b"RIFF"}, r"multi_modal_data.audio\[0\] .*: this model takes text and image"),
                ("<image>", {"image": b"no image"}, r"multi_modal_data.image\[0\] .*: its bytes are no image"),
                ("<image>" * 4, {"image": opened * 2}, "limit-mm-per-prompt"),
            ):
                with pytest.raises(errors.InvalidRequestError, match=why) as raised:
                    llm.generate({"prompt": prompt, "multi_modal_data": data}, greedy, use_tqdm=False)
                assert raised.value.param == "multi_modal_data"


def test_whatever_reads_prompt_ids_knows_spans(llava: Served) -> None:
    """Penalties, log-probabilities of the prompt, stops and grammars beside an image."""
    answer = llava.chat(
        llava.split, asked("a", image_part(picture(5))), prompt_logprobs=1, repetition_penalty=1.3,
        presence_penalty=0.5, logprobs=True, top_logprobs=2, response_format={"type": "json_object"}, max_tokens=40,
    ).json()  # fmt: skip
    [choice] = answer["choices"]
    table, ids = choice["prompt_logprobs"], choice["prompt_token_ids"]
    assert len(table) == len(ids)
    assert [entry is None for entry in table] == [i == 0 or token_id == PLACEHOLDER for i, token_id in enumerate(ids)]
    assert choice["message"]["content"].startswith(("{", " {", "\n{"))


def png_of(width: int, height: int) -> bytes:
    """A PNG whose header says so and that holds next to nothing."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(b"\0" * 99))]
    body = b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body


BAD: dict[str, tuple[Any, str]] = {
    "100 megapixels": (image_part(png_of(10_000, 10_000)), "100000000|10000 x 10000"),
    "beyond Pillow's own limit": (image_part(png_of(65_000, 65_000)), "65000 x 65000|exceeds limit"),
    "truncated": (image_part(picture()[:300]), "can't be decoded"),
    "flipped bytes": (image_part(picture()[:60] + b"\0" * 60 + picture()[120:]), "can't be decoded"),
    "no image": (image_part(b"GIF89a, or so it says"), "no image|can't be decoded"),
    "empty": (image_part(b""), "no image"),
    "a text": (image_part(b"<svg/>" * 9), "no image"),
    "no base64": ({"type": "image_url", "image_url": {"url": "data:image/png;base64,###"}}, "not base64"),
    "no comma": ({"type": "image_url", "image_url": {"url": "data:image/png;base64"}}, "no comma"),
    "no URL": ({"type": "image_url"}, "must be a URL"),
    "a number": ({"type": "image_url", "image_url": {"url": 7}}, "must be a URL"),
    "a file": ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "must begin with"),
    "another host": ({"type": "image_url", "image_url": {"url": "http://example.com/a.png"}}, "allowed-media-domains"),
    "a name of this machine": ({"type": "image_url", "image_url": {"url": "http://localhost:1/"}}, "isn't public"),
    "a host in disguise": ({"type": "image_url", "image_url": {"url": "http://127.0.0.1@10.0.0.1/"}}, "allowed-media"),
    "nobody there": ({"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/a.png"}}, "can't be fetched"),
    "a sound": (sound_part(sound()), "takes text and image"),
    "another kind": ({"type": "video_url", "video_url": {"url": "data:,"}}, "text alone"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_taken_is_refused_by_its_place(case: str, llava: Served) -> None:
    part, why = BAD[case]
    answer = llava.chat(llava.split, asked("a", image_part(picture()), part))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert "messages[1].content[2]" in error["message"]
    assert any(each in error["message"] for each in why.split("|")), error["message"]
    assert error["param"] == "messages"


def test_smallest_images_too_many_and_placeholders_in_text(llava: Served) -> None:
    one = image_part(picture(size=(1, 1)))
    assert llava.chat(llava.split, asked(one)).status_code == 200
    many = llava.chat(llava.split, asked(one, one, one, one))
    assert (many.status_code, "limit-mm-per-prompt" in many.text) == (400, True)
    text = llava.chat(llava.split, asked("what is <image>?", one))
    assert (text.status_code, "leave it out" in text.text) == (400, True)
    cut = llava.chat(llava.split, asked("a", one), truncate_prompt_tokens=5)
    assert (cut.status_code, cut.json()["error"]["param"]) == (400, "truncate_prompt_tokens")
    for node in llava.nodes:
        wait_until(lambda node=node: node.process.logic.is_empty, "its end at each node")  # type: ignore[misc]


def test_a_model_of_text_alone_says_so() -> None:
    with_text = Node(node_options("unified", folder := tiny_model("llama")))
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with RouterInThread(folder, (with_text.info.control_address,), chat_template=template) as router:
        router.wait_ready()
        answer = router.client.post("/v1/chat/completions", json={"messages": asked("a", image_part(picture()))})
        assert answer.status_code == 400
        assert "messages[1].content[1]" in answer.text
        assert "takes text alone" in answer.text
    with_text.stop()


class _Host(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        found = {"/a.png": (200, picture(9)), "/large": (200, b"\0" * 3_000_000), "/moved": (302, b"")}
        status, body = found.get(self.path, (404, b""))
        self.send_response(status)
        if status == 302:
            self.send_header("location", "/a.png")
        self.end_headers()
        try:
            self.wfile.write(body)
        except OSError:
            pass  # whoever asked has had enough

    def log_message(self, *_: object) -> None:
        pass


def test_images_come_from_allowed_hosts_alone(llava: Served) -> None:
    host = ThreadingHTTPServer(("127.0.0.1", 0), _Host)
    threading.Thread(target=host.serve_forever, daemon=True).start()

    def ask(path: str) -> Any:
        url = f"http://127.0.0.1:{host.server_port}{path}"
        return llava.chat(llava.split, asked("a", {"type": "image_url", "image_url": {"url": url}}))

    with_data = llava.chat(llava.split, asked("a", image_part(picture(9)))).json()["choices"][0]["token_ids"]
    assert ask("/a.png").json()["choices"][0]["token_ids"] == with_data
    for path, why in (("/moved", "answered 302"), ("/none", "answered 404"), ("/large", "no image")):
        answer = ask(path)
        assert (answer.status_code, why in answer.text) == (400, True), answer.text
    host.shutdown()
    host.server_close()
