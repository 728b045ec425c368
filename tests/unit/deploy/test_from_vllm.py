"""docs/from_vllm.md names options and settings that are there, or that are answered as it says."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import tandem
from tandem.deploy.command_line.foreign_names import SAME, SHORT, WITHOUT_COUNTERPART
from tandem.deploy.options import SERVE_OPTIONS

PAGE = Path(__file__).resolve().parents[3] / "docs" / "from_vllm.md"


def flags(text: str) -> set[str]:
    found = {name.replace("-", "_") for name in re.findall(r"`--([a-z-]+)[ `]", text)}
    return {name.removeprefix("no_") if name.startswith("no_") else name for name in found}


def test_its_flags_are_answered_as_it_says() -> None:
    rows = [row.split("|")[1:-1] for row in PAGE.read_text().splitlines() if row.startswith("| `-")]
    assert len(rows) > 10
    for theirs, ours in rows:
        unserved = [word for word in ("refused", "change nothing", "changes nothing", "1;") if word in ours]
        for name in flags(theirs):
            if unserved:
                assert name in WITHOUT_COUNTERPART, name
                assert (WITHOUT_COUNTERPART[name].harmless is None) == ("nothing" in unserved[0]), name
            else:
                assert name in SERVE_OPTIONS or name in SAME, name
        assert flags(ours) <= SERVE_OPTIONS.keys(), ours
    assert "-tp" in SHORT.values()


def test_its_classes_have_what_it_says() -> None:
    text = PAGE.read_text()
    fields = {
        field.name for kind in (tandem.RequestOutput, tandem.CompletionOutput) for field in dataclasses.fields(kind)
    }
    for name in ("prompt", "prompt_token_ids", "text", "token_ids", "finish_reason", "reasoning", "tool_calls"):
        assert name in fields
        assert f"{name}`" in text
    settings = tandem.SamplingParams.__dataclass_fields__
    assert {"bad_words", "logits_processors"} & settings.keys() == {"bad_words"}
    assert not hasattr(tandem.LLM, "get_tokenizer")
    assert hasattr(tandem.LLM, "beam_search")
