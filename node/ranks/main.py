"""A process of a tensor-parallel node other than rank 0's: it does what rank 0 announces and says nothing."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from tandem.engine.process.collector import collect_rarely, settle
from tandem.engine.process.process_log import start_log
from tandem.engine.process.process_name import name_process

if TYPE_CHECKING:
    import torch

    from tandem.engine.contracts.config import NodeOptions
    from tandem.engine.running.heads.guess_steps import HeadSteps
    from tandem.engine.running.runner import ModelRunner
    from tandem.node.ranks.channel import HeadCommand
    from tandem.node.ranks.rank_adapters import AdapterFollower
    from tandem.node.setup import LoadedModel

_PR_SET_PDEATHSIG = 1
logger = logging.getLogger(__name__)


def main(fd: str, parent_pid: str) -> None:
    """Runs until rank 0 closes its end of socket `fd`. Does not return."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent_pid):  # it ended before the line above
        os._exit(1)
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 drains and then closes the socket
        signal.signal(number, signal.SIG_IGN)
    start_log()
    collect_rarely()
    try:
        _run(socket.socket(fileno=int(fd)))
        code = 0
    except Exception:
        logger.exception("this rank failed")
        code = 1
    sys.stderr.flush()
    os._exit(code)  # no teardown: NCCL's would wait for ranks that may be gone


def _run(commands: socket.socket) -> None:
    """Goes through the same steps as rank 0 (node/process.py): loads, sizes the pool, then does whatever is
    announced."""
    from tandem.engine.parallel.group import Membership
    from tandem.engine.running.runner import ModelRunner
    from tandem.node.drafting.heads import LoadedHead, make_head_steps
    from tandem.node.ranks.channel import receive_setup
    from tandem.node.ranks.leader import shard_of
    from tandem.node.ranks.lost_steps import write_lost
    from tandem.node.ranks.rank_adapters import AdapterFollower
    from tandem.node.setup import block_window, load, size_pool, with_device_defaults, with_length_that_fits

    setup = receive_setup(commands)
    if setup is None:
        return
    start_log(setup.options.log_level, setup.options.log_format)
    name_process(f"{setup.options.node_id or setup.options.role} {setup.rank}")
    options = replace(setup.options, device_index=setup.options.device_index + setup.rank)
    loaded = load(options, Membership(shard_of(options, setup.rank), setup.port))
    options = with_device_defaults(options, loaded.device)
    num_blocks = size_pool(loaded, options)
    num_usable = num_blocks - block_window(loaded, options).num_null_blocks
    max_model_len = with_length_that_fits(loaded, options, num_usable).max_model_len  # rank 0 says so
    pool = _own_pool(commands, loaded, num_blocks)
    if pool is None:
        return
    eos = loaded.config.eos_token_ids
    runner = ModelRunner(
        loaded.model,
        pool,
        options.scheduler,
        options.cache.block_size,
        max_model_len,
        eos,
        adapters=loaded.adapters,
        tell_lost=partial(write_lost, setup.lost_fd),
        places=loaded.layout.group.places,
    )
    adapters = None if loaded.adapters is None else AdapterFollower(loaded.adapters.store, commands)
    head = None
    if isinstance(loaded.draft, LoadedHead) and options.role != "prefill":
        head = make_head_steps(loaded.draft.head, runner)
    settle()
    _follow(commands, runner, options, adapters, head)


def _own_pool(commands: socket.socket, loaded: LoadedModel, num_blocks: int) -> torch.Tensor | None:
    """The heads that this rank computes: its part of rank 0's pool, or a pool of its own. None: rank 0 is gone."""
    from tandem.engine.device.kv_pool import allocate_pool
    from tandem.node.ranks.channel import receive_pool_file
    from tandem.node.ranks.shared_pool import map_in_rank, ranks_share_pool, ranks_show_pools

    if ranks_share_pool(loaded.layout, loaded.device):
        file = receive_pool_file(commands)
        return None if file is None else map_in_rank(file, loaded.layout, num_blocks)
    pool = allocate_pool(loaded.layout, num_blocks, loaded.device)
    if ranks_show_pools(loaded.layout, loaded.device):
        assert loaded.model.group is not None
        loaded.model.group.share_memory(pool)
    return pool


def _follow(
    commands: socket.socket,
    runner: ModelRunner,
    options: NodeOptions,
    adapters: AdapterFollower | None,
    head: HeadSteps | None,
) -> None:
    """Does what rank 0 announces, until it closes its end."""
    from tandem.node.ranks.channel import receive_command

    while (command := receive_command(commands)) is not None:
        if command.verb == "warm_up":
            runner.warmup()
        elif command.verb == "capture":
            runner.capture_decode_steps(options.prompt_graph_tokens, options.prompt_graph_attention)
        elif command.adapter is not None:
            assert adapters is not None
            adapters.hear(command)
        elif command.head is not None:
            assert head is not None
            _follow_head(head, command.head)
        else:
            assert command.step is not None
            if command.verb == "step":
                runner.execute(command.step)
            else:
                runner.run_dummy(command.step.rows)


def _follow_head(head: HeadSteps, command: HeadCommand) -> None:
    if command.verb == "guess":
        head.guess(command.rows, command.appends)
    elif command.verb == "warm_up":
        head.warm_up()
    else:
        head.capture()
