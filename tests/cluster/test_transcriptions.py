"""/v1/audio/transcriptions through a router and two nodes: tokens equal transformers', bad uploads are refused."""

from __future__ import annotations

import io
import json
import wave
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from router_in_thread import RouterInThread
from split_pair import Pair, make_pair
from tiny_encoder_models import RATE, SAYS, START, reference, tiny_encoder_model

from tandem.router.audio.features import FeatureExtractor

TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"


def wave_file(seconds: float, seed: int = 0) -> bytes:
    samples = np.random.default_rng(seed).standard_normal(int(RATE * seconds)) * 3000
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(RATE)
        writer.writeframes(samples.astype("<i2").tobytes())
    return file.getvalue()


def expected(sound: bytes, begin: list[int], num_tokens: int) -> list[int]:
    """transformers' greedy tokens, but for those that generation_config.json bans."""
    samples = np.frombuffer(sound[44:], "<i2").astype(np.float32) / 32768
    features = torch.from_numpy(FeatureExtractor.of_folder(tiny_encoder_model("whisper")).features(samples))
    model, ids = reference(tiny_encoder_model("whisper")), torch.tensor([begin])
    for index in range(num_tokens):
        with torch.no_grad():
            logits = model(input_features=features, decoder_input_ids=ids).logits[0, -1].clone()
        logits[SAYS["suppress_tokens"] + (SAYS["begin_suppress_tokens"] if not index else [])] = -torch.inf
        ids = torch.cat([ids, logits.argmax()[None, None]], 1)
        if ids[0, -1] == 1:
            break
    return ids[0, len(begin) :].tolist()


@pytest.fixture(scope="module")
def whisper() -> Iterator[Pair]:
    with make_pair("local", model=tiny_encoder_model("whisper")) as pair:
        yield pair


@pytest.fixture(scope="module")
def router(whisper: Pair) -> Iterator[RouterInThread]:
    nodes = (whisper.decode.info.control_address, whisper.prefill.info.control_address)
    with RouterInThread(tiny_encoder_model("whisper"), nodes, local_tail_tokens=0) as router:
        yield router.wait_ready()


def ask(router: RouterInThread, sound: bytes, path: str = TRANSCRIPTIONS, **fields: str) -> tuple[int, dict]:
    answer = router.client.post(path, files={"file": ("a.wav", sound)}, data={"max_completion_tokens": "12", **fields})
    return answer.status_code, answer.json()


@pytest.mark.parametrize(("path", "task"), [(TRANSCRIPTIONS, "transcribe"), (TRANSLATIONS, "translate")])
def test_what_is_heard_is_what_transformers_hears(path: str, task: str, whisper: Pair, router: RouterInThread) -> None:
    sound, handed_over = wave_file(0.8), whisper.source.handoffs_completed
    status, answer = ask(router, sound, path, language="de", response_format="verbose_json")
    assert status == 200, answer
    begin = [START, SAYS["lang_to_id"]["<|de|>"], SAYS["task_to_id"][task], SAYS["no_timestamps_token_id"]]
    assert answer["segments"][0]["tokens"] == expected(sound, begin, 12)
    assert (answer["language"], answer["task"], answer["duration"]) == ("de", task, 0.8)
    whisper.until(lambda: whisper.source.handoffs_completed == handed_over + 1)  # or it was not split


def test_the_language_is_the_one_that_the_model_hears(whisper: Pair, router: RouterInThread) -> None:
    """Finding it out costs no second run of the encoder: its output is in the cache by then."""
    sound = wave_file(0.5, seed=3)

    def num_runs() -> float:
        return sum(node.process.runner.counters["encoder_runs"] for node in (whisper.decode, whisper.prefill))

    runs = num_runs()
    status, answer = ask(router, sound, response_format="verbose_json")
    assert status == 200, answer
    assert num_runs() == runs + 1
    assert answer["language"] in ("de", "en")
    status, same = ask(router, sound, response_format="verbose_json", language=answer["language"])
    assert same["segments"][0]["tokens"] == answer["segments"][0]["tokens"]


def test_long_sounds_are_heard_window_by_window(router: RouterInThread) -> None:
    sound = wave_file(2.4, seed=5)
    status, answer = ask(router, sound, language="en", response_format="verbose_json", prompt="token_ids")
    assert status == 200, answer
    segments = answer["segments"]
    assert len(segments) >= 3
    assert [segment["start"] for segment in segments[1:]] == [segment["end"] for segment in segments[:-1]]
    assert segments[-1]["end"] == pytest.approx(2.4)
    plain = router.client.post(
        TRANSCRIPTIONS,
        files={"file": ("a.wav", sound)},
        data={"language": "en", "response_format": "text", "max_completion_tokens": "12", "prompt": "token_ids"},
    )
    assert plain.headers["content-type"].startswith("text/plain")
    assert plain.text.rstrip("\n") == answer["text"]
    streamed = router.client.post(
        TRANSCRIPTIONS,
        files={"file": ("a.wav", sound)},
        data={"language": "en", "stream": "true", "max_completion_tokens": "12", "prompt": "token_ids"},
    )
    events = [json.loads(line[6:]) for line in streamed.text.split("\n\n") if line]
    assert "".join(event["delta"] for event in events[:-1]).strip() == answer["text"]
    assert (events[-1]["type"], events[-1]["text"]) == ("transcript.text.done", answer["text"])


@pytest.mark.parametrize(
    ("sound", "fields", "why"),
    [
        (b"RIFF is no wave", {}, "the sound can't be taken"),
        (b"", {}, "the sound can't be taken"),
        (wave_file(0.1), {"language": "xx"}, "it knows de, en"),
        (wave_file(0.1), {"model": "another"}, "does not exist"),
        (wave_file(0.1), {"max_completion_tokens": "4000"}, "at most"),
        (wave_file(0.1), {"response_format": "vtt"}, "response_format vtt"),
    ],
)
def test_a_bad_upload_is_refused(sound: bytes, fields: dict, why: str, whisper: Pair, router: RouterInThread) -> None:
    status, answer = ask(router, sound, **fields)
    assert 400 <= status < 500, answer
    assert any(each in answer["error"]["message"] for each in why.split("|")), answer
    whisper.check_whole()


def test_other_bodies_and_other_paths_say_where_to_go(router: RouterInThread) -> None:
    answer = router.client.post(TRANSCRIPTIONS, json={"file": "x"})
    assert answer.status_code == 415
    answer = router.client.post("/v1/completions", json={"prompt": "x"})
    assert (answer.status_code, TRANSCRIPTIONS in answer.json()["error"]["message"]) == (400, True)
