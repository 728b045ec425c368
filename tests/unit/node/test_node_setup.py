"""What a node's steps may hold when nothing was said: by role and device."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from tandem.deploy.options import DEMO_MODEL
from tandem.engine.contracts.config import ModelOptions, NodeOptions, SchedulerOptions
from tandem.engine.contracts.errors import ConfigError
from tandem.node.context import make_clock
from tandem.node.setup import DECODE_ITL_MAX_MS, load, with_device_defaults

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def chosen(role: str, device: torch.device, num_ranks: int = 1, **given: int) -> SchedulerOptions:
    scheduler = SchedulerOptions(**given)  # type: ignore[arg-type]
    options = NodeOptions(role, ModelOptions("m"), scheduler=scheduler, tensor_parallel_size=num_ranks)
    return with_device_defaults(options, device).scheduler


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_only_prefill_nodes_cut_prompts_short_for_who_waits(device: torch.device) -> None:
    assert chosen("prefill", device).contended_prefill_chunk == 2048
    assert chosen("decode", device).contended_prefill_chunk == 0
    assert chosen("unified", device).contended_prefill_chunk == 0


def test_a_decode_node_on_a_gpu_takes_prompt_work_by_measured_times() -> None:
    for num_ranks in (1, 2):
        assert chosen("decode", CUDA, num_ranks).itl_max_ms == DECODE_ITL_MAX_MS
        assert chosen("decode", CUDA, num_ranks).decode_prompt_budget == 0
    assert chosen("decode", CPU).decode_prompt_budget == 256
    assert chosen("unified", CUDA).decode_prompt_budget == 0, "and so does one that does all work"


def test_what_was_given_stays() -> None:
    given = {
        "contended_prefill_chunk": 512,
        "decode_prompt_budget": 64,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 777,
    }
    for role in ("prefill", "decode", "unified"):
        scheduler = chosen(role, CUDA, **given)
        assert {name: getattr(scheduler, name) for name in given} == given


@pytest.mark.parametrize(
    ("role", "has_deadlines", "num_chats"), [("unified", True, 4), ("unified", False, 1), ("prefill", False, 4)]
)
def test_over_how_many_prompt_tokens_their_time_is_measured(role: str, has_deadlines: bool, num_chats: int) -> None:
    clock = make_clock(role, has_deadlines)
    for chat in range(4):
        assert (clock.seconds_per_token > 0) == (chat >= num_chats)
        clock.launched(chat, 256, 256)
        clock.completed(chat)
    assert clock.seconds_per_token > 0


def test_a_leaning_is_for_nodes_that_do_all_work_by_deadlines(caplog: pytest.LogCaptureFixture) -> None:
    options = NodeOptions("prefill", ModelOptions(str(DEMO_MODEL)), leaning="decode", device="cpu")
    with pytest.raises(ConfigError, match="leave it out, or start `tandem unified`"):
        load(options)
    for target, warnings in ((0.0, ["--leaning does nothing without --tpot-target-ms (docs/leanings.md)"]), (25.0, [])):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="tandem.node.setup"):
            load(replace(options, role="unified", scheduler=SchedulerOptions(tpot_target_ms=target)))
        assert caplog.messages == warnings
