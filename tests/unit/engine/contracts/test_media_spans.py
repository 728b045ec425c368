"""Spans of prompts that stand for images and sounds: their ids, and what is no such span."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from tiny_media import with_spans

from tandem.engine.contracts.hashing import hash_prompt
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.wire import codec
from tandem.engine.contracts.wire.media import (
    MIN_SPAN,
    MediaItem,
    MediaTensor,
    digest_ids,
    problem_of_media,
)
from tandem.engine.contracts.wire.requests import Submit
from tandem.node.submit_check import problem_of

PIXELS = {"pixel_values": np.arange(6, dtype=np.float32).reshape(1, 6), "input_ids": np.full((1, 8), 5)}
ITEM = MediaItem.of(3, 8, "image", PIXELS)
TEXT = np.arange(20, dtype=np.int32)
PROMPT = with_spans(TEXT, [ITEM])


def submit_of(media: tuple[MediaItem, ...], token_ids: np.ndarray, **fields: object) -> Submit:
    return Submit(
        request_id="r", attempt=0, mode="full", sampling=SamplingParams(max_tokens=8), media=media,
        prompt_token_ids=token_ids.astype("<i4").tobytes(), **fields,  # type: ignore[arg-type]
    )  # fmt: skip


def test_a_span_says_what_its_item_holds():
    ids = PROMPT[3:11]
    assert (ids < 0).all()
    assert len(set(ids.tolist())) == 8, "each word of a digest stands in it"
    assert np.array_equal(np.delete(PROMPT, range(3, 11)), np.delete(TEXT, range(3, 11)))
    assert np.array_equal(digest_ids(ITEM.digest, 20)[:8], digest_ids(ITEM.digest, 20)[8:16])
    assert np.array_equal(with_spans(TEXT, [MediaItem.of(3, 8, "image", dict(PIXELS))]), PROMPT)


@pytest.mark.parametrize(
    ("kind", "arrays"),
    [
        ("audio", PIXELS),
        ("image", {**PIXELS, "pixel_values": PIXELS["pixel_values"] + 1e-6}),
        ("image", {**PIXELS, "pixel_values": PIXELS["pixel_values"].reshape(2, 3)}),
        ("image", {**PIXELS, "input_ids": PIXELS["input_ids"].astype(np.int32)}),
        ("image", {"pixel_valuez": PIXELS["pixel_values"], "input_ids": PIXELS["input_ids"]}),
    ],
)
def test_another_item_shares_no_hash_from_its_first_block_on(kind: str, arrays: dict) -> None:
    other = with_spans(TEXT, [MediaItem.of(3, 8, kind, arrays)])  # type: ignore[arg-type]
    hashes, others = (hash_prompt(ids, 2, lambda salt: b"root" * 4) for ids in (PROMPT, other))
    assert hashes[0] == others[0]
    assert not set(hashes[1:]) & set(others[1:])


def test_an_item_travels_whole():
    submit = submit_of((ITEM,), PROMPT)
    back = codec.decode_to_node(codec.encode(submit))
    assert back == submit
    assert isinstance(back, Submit)
    assert np.array_equal(back.media[0].arrays()["pixel_values"], PIXELS["pixel_values"])
    assert problem_of(submit, 100, 64, frozenset({"image"})) == ""


def other(**fields: object) -> MediaItem:
    return msgspec.structs.replace(ITEM, **fields)


WRONG: dict[str, tuple[tuple[MediaItem, ...], np.ndarray]] = {
    "no item": ((), PROMPT),
    "of another kind": ((MediaItem.of(3, 8, "audio", PIXELS),), PROMPT),
    "another place": ((other(start=4),), PROMPT),
    "too short": ((other(length=MIN_SPAN - 1),), PROMPT),
    "beyond the prompt": ((other(start=15),), PROMPT),
    "beyond all counts": ((other(start=(1 << 31) - 1, length=(1 << 31) - 1),), PROMPT),
    "twice": ((ITEM, ITEM), PROMPT),
    "another digest": ((other(digest=bytes(32)),), PROMPT),
    "half a digest": ((other(digest=ITEM.digest[:16]),), PROMPT),
    "a stray id": ((ITEM,), np.where(np.arange(20) == 1, -5, PROMPT)),
    "a torn tensor": ((other(tensors=(MediaTensor("pixel_values", "float32", (3,), b"1234"),)),), PROMPT),
    "an absurd shape": ((other(tensors=(MediaTensor("p", "float32", (1 << 30,) * 9, b""),)),), PROMPT),
    "an object": ((other(tensors=(MediaTensor("p", "object", (1,), b"12345678"),)),), PROMPT),
    "one name twice": ((other(tensors=(ITEM.tensors[0],) * 2),), PROMPT),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_span_is_refused_in_words(case: str) -> None:
    media, token_ids = WRONG[case]
    assert problem_of(submit_of(media, token_ids), 100, 64, frozenset({"image"}))


@pytest.mark.parametrize("fields", [{"num_prior_output_tokens": 1}, {"num_public_tokens": 4}])
def test_a_span_is_neither_output_nor_public(fields: dict) -> None:
    last = MediaItem.of(12, 8, "image", PIXELS) if "num_prior_output_tokens" in fields else ITEM
    submit = submit_of((last,), with_spans(TEXT, [last]), **fields)
    assert problem_of(submit, 100, 64, frozenset({"image"}))


def test_a_model_of_text_alone_takes_none():
    assert "takes no image" in problem_of(submit_of((ITEM,), PROMPT), 100, 64)
    assert problem_of_media((), TEXT) == ""
