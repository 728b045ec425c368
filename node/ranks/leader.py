"""The other ranks of a tensor-parallel node, as rank 0 starts, leads and watches them.

A rank's end is the node's end: a step that lacks a rank can't finish, not even fail, since the device waits for it.
Rank 0's end is the ranks' end as well: the kernel kills them (PR_SET_PDEATHSIG), and their socket closes.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

import torch

from tandem.engine.adapters.node_adapters import NodeAdapters
from tandem.engine.adapters.store import AdapterStore
from tandem.engine.contracts.config import NodeOptions
from tandem.engine.contracts.errors import ConfigError
from tandem.engine.contracts.model_folder import resolve_model
from tandem.engine.models.choice import check_shares
from tandem.engine.parallel.group import Membership
from tandem.engine.parallel.rendezvous import STUCK_S, make_store
from tandem.engine.parallel.sharding import Shard
from tandem.engine.process.watched import end_process
from tandem.engine.scheduling.speculation.head_tokens import HeadRow, HeadVerb
from tandem.engine.scheduling.step import BlockAppend, SchedulerOutput
from tandem.node.ranks.channel import (
    Command,
    HeadCommand,
    PoolFile,
    RankSetup,
    Verb,
    as_announced,
    limit_sends,
    send,
)
from tandem.node.ranks.lost_steps import LostSteps
from tandem.node.ranks.rank_adapters import AdapterLeader

logger = logging.getLogger(__name__)
END_S = 5.0  # how long a rank that was told to end may take; a guess
# Not `python -m`, which would put the working directory on sys.path, where a folder may shadow a package.
PROGRAM = "import sys; sys.path.remove(''); from tandem.node.ranks.main import main; main(*sys.argv[1:])"


def start_ranks(options: NodeOptions) -> Ranks | None:
    """Starts the other ranks; None for a node of one rank. Raises ConfigError, before any process starts, for a model
    that can't be shared out.

    To be called from the thread that lives longest: the ranks end with it.
    """
    size = options.tensor_parallel_size
    if size == 1:
        return None
    if size < 1:
        raise ConfigError(f"--tensor-parallel-size {size}: give the number of GPUs of a node, 1 or more")
    folder = resolve_model(options.model.model, options.model.revision)
    check_shares(folder, options.model, shard_of(options, 0))
    if options.device != "cpu" and torch.cuda.is_available():
        available = torch.cuda.device_count() - options.device_index
        if size > available:
            raise ConfigError(
                f"--tensor-parallel-size {size}, but {available} GPUs are visible from index {options.device_index} on"
            )
    return Ranks(options)


def shard_of(options: NodeOptions, rank: int) -> Shard:
    return Shard(rank, options.tensor_parallel_size, options.enable_expert_parallel)


def adapter_source(
    adapters: NodeAdapters | None, ranks: Ranks | None, within_s: float
) -> AdapterStore | AdapterLeader | None:
    """Where a node's adapters come from; None: it takes none. `within_s`: what other ranks may take to read one."""
    if adapters is None or ranks is None:
        return None if adapters is None else adapters.store
    return ranks.lead_adapters(adapters.store, within_s)


class Ranks:
    """The processes of ranks 1 and up. `membership` is rank 0's own place."""

    def __init__(self, options: NodeOptions, on_death: Callable[[str], None] | None = None) -> None:
        """`on_death` is told which rank ended unasked, from a thread of its own; by default this process ends."""
        size = options.tensor_parallel_size
        store = make_store()
        self.membership = Membership(shard_of(options, 0), store.port, store)
        # At once: other threads may wait for the device, which waits for the rank.
        self._on_death = on_death or end_process
        self._closing = threading.Event()
        self._processes: list[subprocess.Popen] = []
        self._sockets: list[socket.socket] = []
        self._turn = threading.Lock()  # steps are announced by one thread, adapters by another
        self._lost = LostSteps()
        for rank in range(1, size):
            self._start(RankSetup(options, rank, store.port, self._lost.write_fd))
        self._lost.started()
        self._watcher = threading.Thread(target=self._watch, name="rank-watch", daemon=True)
        self._watcher.start()

    def announce(self, verb: Verb, step: SchedulerOutput | None = None) -> None:
        """Orders every rank to do this next; the caller must then do the same. Raises OSError when a rank is gone."""
        self._tell(Command(verb, None if step is None else as_announced(step)))

    def announce_head(self, verb: HeadVerb, rows: Sequence[HeadRow], appends: Sequence[BlockAppend]) -> None:
        """The same of the head that guesses, if the ranks have one."""
        self._tell(Command("head", head=HeadCommand(verb, tuple(rows), tuple(appends))))

    def have_lost(self, step_id: int) -> bool:
        """Whether a rank had no memory for this step, which has ended, or for one before it."""
        return self._lost.have(step_id)

    def lead_adapters(self, store: AdapterStore, within_s: float) -> AdapterLeader:
        """What finds adapters for all ranks, of which rank 0 has this store."""
        return AdapterLeader(store, self._tell, self._sockets, within_s)

    def share_pool(self, file: PoolFile) -> None:
        """Hands the shared pool to the ranks, before the first command, where `ranks_share_pool`."""
        send(self._sockets, file)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def close(self) -> None:
        """Ends the ranks: at the end of the stream of commands each ends by itself."""
        self._closing.set()
        for end in self._sockets:
            end.close()
        for process in self._processes:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._watcher.join()
        self._lost.close()

    def _tell(self, command: Command) -> None:
        with self._turn:
            send(self._sockets, command)

    def _start(self, setup: RankSetup) -> None:
        ours, theirs = socket.socketpair()
        limit_sends(ours, STUCK_S)
        with theirs:
            command = [sys.executable, "-c", PROGRAM, str(theirs.fileno()), str(os.getpid())]
            fds = [theirs.fileno(), setup.lost_fd]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds)
        self._processes.append(process)
        self._sockets.append(ours)
        send([ours], setup)

    def _watch(self) -> None:
        """Waits until the first rank ends."""
        poll = select.poll()
        ranks = {os.pidfd_open(process.pid): rank for rank, process in enumerate(self._processes, start=1)}
        try:
            for fd in ranks:
                poll.register(fd, select.POLLIN)
            ended = [ranks[fd] for fd, _ in poll.poll()]
        finally:
            for fd in ranks:
                os.close(fd)
        if not self._closing.is_set():
            self._on_death(f"rank {ended[0]} (process {self.pids[ended[0] - 1]}) ended")
