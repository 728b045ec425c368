"""Tokenizer, incremental detokenizers, stop strings, and what a sample shows of its tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from router_in_thread import BOS, EOS, VOCAB_SIZE, make_tokenizer_folder
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, normalizers, trainers

from tandem.engine.contracts.errors import ConfigError
from tandem.engine.contracts.wire.parts import TokenLogprobs
from tandem.router.requests.actions import EmitTokens
from tandem.router.requests.sample_output import Piece, SampleOutput
from tandem.router.text.detokenizer import REPLACEMENT, ByteDetokenizer, StopSearch, WindowDetokenizer
from tandem.router.text.tokenizer import Tokenizer

TEXTS = ["the quick café 日本語 😀🎉 Ελληνικά", "def f(x):\n    return x", " leading", "", "\x00\x7f", "a\u0301e\u0301"]


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Shaped like Llama 2's: word pieces with U+2581 for spaces, unknown characters as byte tokens."""
    folder = tmp_path_factory.mktemp("byte_fallback")
    tokenizer = RustTokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 3, trainer)
    raw = json.loads(tokenizer.to_str())
    raw["added_tokens"] = raw["added_tokens"][:3]  # byte tokens are ordinary vocabulary
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    return Tokenizer(folder)


def stream(tokenizer: Tokenizer, ids: list[int], prompt: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer(prompt)
    return [*(detokenizer.feed(i) for i in ids), detokenizer.flush()]


# --- tokenizer ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
def test_encoding_and_decoding_are_the_files(tokenizer: Tokenizer, folder: Path, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == RustTokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    assert tokenizer.decode(ids) == text


def test_post_processor_adds_bos_and_can_be_told_not_to(tmp_path: Path) -> None:
    tokenizer = Tokenizer(make_tokenizer_folder(tmp_path, with_bos=True))
    assert tokenizer.encode("the fox")[0] == 0
    assert tokenizer.encode("the fox", add_special_tokens=False) == tokenizer.encode("the fox")[1:]


@pytest.mark.parametrize(
    "config",
    [{}, {"add_bos_token": True}, {"add_bos_token": False, "add_eos_token": True}, {"add_eos_token": False}],
)
def test_special_tokens_are_as_in_transformers(tmp_path: Path, config: dict[str, bool]) -> None:
    transformers = pytest.importorskip("transformers")
    folder = make_tokenizer_folder(tmp_path, with_bos=True)
    settings_ = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings_))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    assert Tokenizer(folder).encode("the quick fox") == theirs("the quick fox")["input_ids"]


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_encoding_starts_no_threads(folder: Path) -> None:
    """The library would start one for each core, in each router process."""
    code = (
        "import os, sys; from tandem.router.text.tokenizer import Tokenizer; tokenizer = Tokenizer(sys.argv[1]);"
        "before = os.listdir('/proc/self/task'); tokenizer.encode('a text'); tokenizer.decode([1, 2]);"
        "assert os.listdir('/proc/self/task') == before"
    )
    environ = {key: value for key, value in os.environ.items() if key != "TOKENIZERS_PARALLELISM"}
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, env=environ)


def test_folders_that_are_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no tokenizer"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="can't be read as a tokenizer"):
        Tokenizer(tmp_path)


def test_token_text_of_half_a_character(tokenizer: Tokenizer) -> None:
    (half,) = [i for i in range(VOCAB_SIZE) if tokenizer.token_string(i) == "ð"]  # byte 0xF0
    assert tokenizer.token_text(half) == "bytes:\\xf0"
    assert tokenizer.token_text(tokenizer.encode("the")[0]) == "the"
    assert tokenizer.token_text(10**6) == ""


# --- detokenizers ---------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, VOCAB_SIZE + 20), max_size=40))
def test_byte_level_stream_equals_the_whole_for_any_tokens(tokenizer: Tokenizer, ids: list[int]) -> None:
    assert "".join(stream(tokenizer, ids, [])) == tokenizer.decode(ids)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40))
def test_no_half_character_is_ever_emitted(tokenizer: Tokenizer, text: str) -> None:
    pieces = stream(tokenizer, tokenizer.encode(text), [])
    assert "".join(pieces) == text
    assert not any(REPLACEMENT in piece for piece in pieces) or REPLACEMENT in text


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet="the quick é日😀", max_size=30), prompt=st.sampled_from(["the", "the quick ", "é"]))
def test_window_stream_continues_the_prompt(byte_fallback: Tokenizer, text: str, prompt: str) -> None:
    prompt_ids = byte_fallback.encode(prompt)
    ids = byte_fallback.encode(text, add_special_tokens=False)
    pieces = stream(byte_fallback, ids, prompt_ids)
    assert isinstance(byte_fallback.detokenizer([]), WindowDetokenizer)
    assert prompt + "".join(pieces) == byte_fallback.decode(prompt_ids + ids)
    assert not any(REPLACEMENT in piece for piece in pieces)


def test_special_tokens_are_skipped_but_do_not_split_characters(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("😁")
    assert len(ids) > 1
    assert isinstance(tokenizer.detokenizer([]), ByteDetokenizer)
    assert "".join(stream(tokenizer, [0, *ids[:1], 1, *ids[1:], 1], [])) == "😁"


# --- stop strings ---------------------------------------------------------------------------------------------


def whole_search(text: str, stops: list[str]) -> tuple[str, bool]:
    """The definition: characters come one by one; the first stop string to be complete ends the text before it."""
    for end in range(1, len(text) + 1):
        starts = [end - len(s) for s in stops if text[:end].endswith(s)]
        if starts:
            return text[: min(starts)], True
    return text, False


@settings(max_examples=200, deadline=None)
@given(
    pieces=st.lists(st.text(alphabet="abc", max_size=4), max_size=12),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stop_search_is_independent_of_token_borders(pieces: list[str], stops: list[str]) -> None:
    search, shown, found = StopSearch(stops), "", False
    expected, expected_found = whole_search("".join(pieces), stops)
    for piece in pieces:
        text, found = search.feed(piece)
        shown += text
        assert expected.startswith(shown), "text of a stop string was shown"
        if found:
            break
    assert found == expected_found
    assert shown + search.flush() == expected


def test_only_a_possible_beginning_is_held_back() -> None:
    search = StopSearch(["STOP"])
    assert [search.feed(piece)[0] for piece in ["one S", "T", "O two", " ST"]] == ["one ", "", "STO two", " "]
    assert search.flush() == "ST"


# --- samples --------------------------------------------------------------------------------------------------


def sample(tokenizer: Tokenizer, stops: list[str], min_tokens: int = 0, logprobs: int | None = None) -> SampleOutput:
    return SampleOutput(tokenizer, tokenizer.detokenizer([]), stops, logprobs, min_tokens, 0)


def emit(ids: list[int], finish: str | None = None, stop_token: int | None = None) -> EmitTokens:
    entries = tuple(TokenLogprobs((i, i, 5), (-1.0, -1.0, float("-inf"))) for i in ids)
    return EmitTokens(0, tuple(ids), entries, finish, stop_token)  # type: ignore[arg-type]


def test_stop_string_across_tokens_ends_the_sample_and_cuts_the_delta(tokenizer: Tokenizer) -> None:
    output = sample(tokenizer, ["quick"])
    ids = tokenizer.encode("the qu") + tokenizer.encode("ick brown", add_special_tokens=False)
    piece = output.feed(emit(ids, "length"))
    assert piece is not None
    assert (piece.text, piece.finish_reason, output.stopped) == ("the ", "stop", True)
    assert tokenizer.decode(list(piece.token_ids)).startswith("the quick")
    assert len(piece.token_ids) < len(ids)
    assert output.feed(emit(ids)) is None


@pytest.mark.parametrize("at_once", [2, 3, 99])
@pytest.mark.parametrize("stops", [[], ["jump"], ["fox jumps over", "own"]])
def test_tokens_told_at_once_say_what_they_say_one_by_one(tokenizer: Tokenizer, stops: list[str], at_once: int) -> None:
    ids = tokenizer.encode("the quick brown fox 😁 jumps over")
    said = []
    for size in (1, at_once):
        output = sample(tokenizer, stops, min_tokens=4, logprobs=1)
        pieces = [
            output.feed(emit(ids[i : i + size], "length" if i + size >= len(ids) else None))
            for i in range(0, len(ids), size)
        ]
        fed = [piece for piece in pieces if piece is not None]
        texts = [text for piece in fed for text in piece.texts()]
        assert "".join(texts) == "".join(piece.text for piece in fed)
        token_ids = [each for piece in fed for each in piece.token_ids]
        offsets = [each for piece in fed if piece.logprobs is not None for each in piece.logprobs.text_offset]
        said.append((texts, token_ids, offsets, output.num_tokens, fed[-1].finish_reason))
    assert said[0] == said[1]


def test_stop_strings_within_min_tokens_do_not_count(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the the the")
    output = sample(tokenizer, ["the"], min_tokens=len(ids) - 1)
    texts = [piece.text for i in ids if (piece := output.feed(emit([i])))]
    assert "".join(texts).rstrip() == "the the"
    assert output.stopped


def test_a_stop_token_has_no_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the fox")
    piece = sample(tokenizer, []).feed(emit(ids, "stop", stop_token=ids[-1]))
    assert piece is not None
    assert (piece.text, len(piece.token_ids), piece.finish_reason) == ("the", len(ids), "stop")


def test_an_unfinished_character_is_shown_at_the_end(tokenizer: Tokenizer) -> None:
    output = sample(tokenizer, [])
    ids = tokenizer.encode("😁")[:1]
    first, last = output.feed(emit(ids)), output.feed(emit([], "length"))
    assert isinstance(first, Piece)
    assert isinstance(last, Piece)
    assert (first.text, last.text) == ("", REPLACEMENT)


def test_logprobs_name_text_and_place_of_each_token(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the fox")
    piece = sample(tokenizer, [], logprobs=2).feed(emit(ids))
    assert piece is not None
    assert piece.logprobs is not None
    assert piece.logprobs.tokens == ["the", " fox"]
    assert piece.logprobs.text_offset == [0, 3]
    assert piece.logprobs.top_logprobs[0] == {"the": -1.0, tokenizer.token_text(5): -9999.0}
