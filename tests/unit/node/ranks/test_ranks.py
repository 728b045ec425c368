"""Ranks as processes: whose end ends whom. No model is computed here."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from waiting import PATIENCE_S, wait_until_gone

from tandem.engine.contracts.config import ModelOptions, NodeOptions
from tandem.engine.contracts.errors import ConfigError
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.scheduling.step import (
    BlockAppend,
    BlockCopy,
    ForkSlot,
    NewSlot,
    SampleRow,
    ScheduledRow,
    SchedulerOutput,
)
from tandem.kv_connector.protocol.jobs import StepMoves
from tandem.node.ranks import leader as ranks_module
from tandem.node.ranks.channel import Command, as_announced, limit_sends, receive_command, send
from tandem.node.ranks.leader import Ranks, start_ranks
from tiny_models import tiny_model

# Starts ranks, says which processes they are, and waits to be killed.
PARENT = """
import sys, time
from tandem.engine.contracts.config import ModelOptions, NodeOptions
from tandem.node.ranks.leader import start_ranks
options = NodeOptions("unified", ModelOptions(sys.argv[1]), device="cpu", tensor_parallel_size=2)
print(start_ranks(options).pids[0], flush=True)
time.sleep(600)
"""


def options_of(size: int, role: str = "unified") -> NodeOptions:
    model = ModelOptions(str(tiny_model("llama")))
    return NodeOptions(role, model, device="cpu", tensor_parallel_size=size)  # type: ignore[arg-type]


def test_the_death_of_a_rank_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "END_S", 0.1)
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    ranks = Ranks(options_of(3), on_death=told.put)
    try:
        os.kill(ranks.pids[1], signal.SIGKILL)
        assert "rank 2" in told.get(timeout=PATIENCE_S)
    finally:
        ranks.close()
    assert told.empty()


def test_closing_ends_the_ranks_and_is_no_death(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "END_S", 0.1)  # they are still starting and don't read yet
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    ranks = Ranks(options_of(2), on_death=told.put)
    (pid,) = ranks.pids
    ranks.close()
    wait_until_gone(pid)
    assert told.empty()


def test_ranks_end_with_rank_0() -> None:
    command = [sys.executable, "-c", PARENT, str(tiny_model("llama"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
        wait_until_gone(pid)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_node_takes_only_gpus_that_there_are(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(ranks_module.torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="--tensor-parallel-size 2, but 1 GPUs are visible from index 1 on"):
        start_ranks(replace(options_of(2, role), device="auto", device_index=1))


def test_sizes_that_cannot_be_are_refused_before_a_process_starts() -> None:
    assert start_ranks(options_of(1)) is None
    with pytest.raises(ConfigError, match="number of GPUs"):
        start_ranks(options_of(0))
    with pytest.raises(ConfigError, match="does not divide"):
        start_ranks(options_of(3))


def test_a_rank_that_reads_nothing_holds_nobody_up() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        limit_sends(ours, 0.05)
        send([ours], Command("read"))
        assert receive_command(theirs) == Command("read")
        prompt = np.zeros(1 << 24, np.int32)  # more than a socket holds
        step = SchedulerOutput(0, (), (), new_slots=(NewSlot(0, prompt, 1, (), SamplingParams(), 0),))
        with pytest.raises(TimeoutError, match="stopped reading"):
            send([ours], Command("step", step))


def test_a_step_arrives_as_it_was_sent() -> None:
    sampling = SamplingParams(temperature=0.5, seed=2**64 - 1, logit_bias=((3, -1.5),), stop_token_ids=(9,))
    prompt = np.arange(70000, dtype=np.int32)  # more than a socket's buffer takes at once
    step = SchedulerOutput(
        7,
        (ScheduledRow(1, 0, 70000, True), ScheduledRow(2, 8, 1)),
        (SampleRow(1, 2, 9, 0, 4),),
        (NewSlot(1, prompt, 69999, (4, 5), sampling, 2),),
        (ForkSlot(3, 1, 5, (4, 9), 1),),
        (BlockAppend(2, 1, 8),),
        (BlockCopy(5, 9, 3),),
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = threading.Thread(target=send, args=([ours], Command("step", step)))
        sender.start()
        got = receive_command(theirs)
        sender.join()
        assert got is not None
        assert got.step is not None
        (new,) = got.step.new_slots
        assert np.array_equal(new.token_ids, prompt)
        assert new.token_ids.dtype == np.int32
        assert (new.sampling, new.block_ids, new.sample_index) == (sampling, (4, 5), 2)
        assert got.step.connector_meta is None
        for field in ("step_id", "rows", "samples", "forks", "block_appends", "copies"):
            assert getattr(got.step, field) == getattr(step, field)
        for meta in (StepMoves(7), StepMoves(7, by_layer=False)):
            moves_kv = msgspec.structs.replace(step, forks=(), new_slots=(), connector_meta=meta)
            send([ours], Command("step", as_announced(moves_kv)))
            got = receive_command(theirs)
            assert got is not None
            assert got.step is not None
            kind = (moves_kv.is_decode, moves_kv.is_only_rows)
            assert (got.step.is_decode, got.step.is_only_rows) == kind, "one rank would replay a graph, the other not"
        ours.close()
        assert receive_command(theirs) is None
