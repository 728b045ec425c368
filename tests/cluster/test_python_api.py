"""`LLM` over a single node, `AsyncLLM` over a split cluster of their own: the same answers, and nothing left behind."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from waiting import is_gone, wait_until

from tandem import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    LoRARequest,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
    errors,
)

PROMPTS = ["def read_lines(path):", [5, 6, 7], {"prompt": "Return a new"}]
GREEDY = SamplingParams(max_tokens=12, temperature=0, logprobs=1)
BEAMS = BeamSearchParams(beam_width=3, max_tokens=8)
CONVERSATION = [{"role": "user", "content": "def read_lines(path):"}]
SMALL = {"num_blocks": 128, "max_num_seqs": 8, "max_num_batched_tokens": 256, "quiet": True}


def texts(outputs: list[RequestOutput]) -> list[tuple[list[int], str, list[int], str | None]]:
    return [
        (output.prompt_token_ids, sample.text, sample.token_ids, sample.finish_reason)
        for output in outputs
        for sample in output.outputs
    ]


def children() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


async def split() -> tuple[list[RequestOutput], RequestOutput]:
    llm = AsyncLLM(prefill=1, decode=1, **SMALL)
    assert not llm.is_ready, "its construction waited, and held up everybody's event loop"
    async with llm:
        outputs = await asyncio.gather(*(llm.submit(prompt, GREEDY) for prompt in PROMPTS))
        long = SamplingParams(max_tokens=1000, n=2, ignore_eos=True)
        async for aborted in llm.generate("def read", long, "r1"):
            if len(aborted.outputs[0].token_ids) > 10:
                llm.abort("r1")
        streamed = [output async for output in llm.generate(PROMPTS[0], GREEDY)]
        assert texts(streamed[-1:]) == texts(outputs[:1])
        searched = [output async for output in llm.generate(PROMPTS[0], BEAMS.as_sampling())]
        assert [beam.score for beam in searched[-1].outputs] == sorted(
            (beam.score or 0 for beam in searched[-1].outputs), reverse=True
        )
        outputs += [searched[-1], await llm.complete_chat(CONVERSATION, BEAMS.as_sampling())]
        said = [output async for output in llm.chat(CONVERSATION, GREEDY)][-1]
        assert texts([said]) == texts([await llm.complete_chat(CONVERSATION, GREEDY)])
        outputs.append(said)
        with pytest.raises(errors.InvalidRequestError, match="temperature"):
            async for _ in llm.generate("x", SamplingParams(temperature=3)):
                pass
        return outputs, aborted


def test_a_single_node_and_a_split_cluster_answer_alike_and_end() -> None:
    before = children()
    with LLM(**SMALL, enforce_eager=True, trust_remote_code=True) as llm:
        single = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert [output.prompt for output in single] == [PROMPTS[0], None, "Return a new"]
        assert all(output.finished and output.outputs[0].cumulative_logprob < 0 for output in single)
        (found,) = llm.beam_search(PROMPTS[0], BEAMS)
        searched = llm.generate(PROMPTS[0], BEAMS.as_sampling(), use_tqdm=False)
        assert [beam.text for beam in found.sequences] == [PROMPTS[0] + beam.text for beam in searched[0].outputs]
        assert [beam.cum_logprob for beam in found.sequences] == [
            beam.cumulative_logprob for beam in searched[0].outputs
        ]
        assert found.sequences[0].tokens == searched[0].prompt_token_ids + searched[0].outputs[0].token_ids
        single += [*searched, *llm.chat(CONVERSATION, BEAMS.as_sampling())]
        held = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a[bc]{3}"))
        assert re.fullmatch("a[bc]{3}", llm.generate("x", held, use_tqdm=False)[0].outputs[0].text)
        (said,) = llm.chat(CONVERSATION, GREEDY)
        (row, *_) = said.outputs[0].logprobs or ()
        assert next(iter(row)) == said.outputs[0].token_ids[0]
        [(token_id, likeliest), *_] = (single[0].outputs[0].logprobs or [{}])[0].items()
        assert (token_id, likeliest.rank) == (single[0].outputs[0].token_ids[0], 1)
        assert single[0].outputs[0].text.startswith(likeliest.decoded_token)
        assert said.outputs[0].text
        single.append(said)
        both = llm.generate(["a", "b"], [SamplingParams(max_tokens=1, n=2), SamplingParams(max_tokens=3)])
        assert [len(output.outputs) for output in both] == [2, 1]
        assert (
            len(llm.submit("def a", SamplingParams(max_tokens=5, ignore_eos=True)).result().outputs[0].token_ids) == 5
        )
        with pytest.raises(errors.InvalidRequestError) as raised:
            llm.generate(["fine", "x"], SamplingParams(temperature=7))
        assert raised.value.param == "temperature"
        with pytest.raises(errors.InvalidRequestError, match="--enable-lora"):
            llm.generate("x", lora_request=LoRARequest("sql", 1, "/nowhere"))
        with pytest.raises(errors.ModelNotFoundError):
            llm.generate("x", lora_request=LoRARequest("sql"))
        (outputs, aborted) = asyncio.run(split())
        assert {sample.finish_reason for sample in aborted.outputs} == {"abort"}
        assert texts(outputs) == texts(single)
    assert children() <= before
    for ask in (llm.generate, llm.submit):
        with pytest.raises(RuntimeError, match="this LLM is closed"):
            ask("x")


def test_a_program_that_is_killed_takes_its_server_along(tmp_path: Path) -> None:
    code = f"import time; from tandem import LLM; LLM(**{SMALL!r}); print('up', flush=True); time.sleep(600)"
    program = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    assert program.stdout is not None
    with program.stdout:
        assert program.stdout.readline() == "up\n"
        family = psutil.Process(program.pid).children(recursive=True)
        assert len(family) >= 3
        program.kill()
        program.wait()
    wait_until(lambda: all(is_gone(each.pid) for each in family), "the server's end")


def test_nobody_answers() -> None:
    with LLM(url="http://127.0.0.1:9") as llm, pytest.raises(errors.TransportError, match="no answer"):
        llm.generate("x", use_tqdm=False)


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError, match=r"config\.json"):
        LLM(str(tmp_path), quiet=True)
