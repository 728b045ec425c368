"""Access to the NIXL library: finds its wheel, checks UCX's settings, wraps one agent.

An agent is a UCX context with its workers, connections and registered memory. Here each link has one agent on each
side, used by one thread and without a progress thread of its own (it would spin on a core even when nothing moves).
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import secrets
import threading
from typing import Any

import numpy as np
import torch

from tandem.engine.contracts.errors import TransportError

# UCX transports with which a source stores into the sink's memory by itself, as with a mapping: the end of the sink's
# agent does not stop it. Nodes of one host have transports of their own, which know how to end that.
_STORES_BY_SOURCE = ("cma", "xpmem", "knem", "cuda_ipc")
_ALIASES_WITH_THEM = ("all", "sm", "shm", "mm", "cuda", "rocm", "ze")
DEFAULT_UCX_TLS = "^" + ",".join(_STORES_BY_SOURCE)
_make_lock = threading.Lock()


def unsafe_ways(ucx_tls: str) -> list[str]:
    """Lists the entries of a UCX_TLS value that would let a source write beyond the end of the sink's agent."""
    names = [name.strip().partition(":")[0].lower() for name in ucx_tls.lstrip("^").split(",")]
    if ucx_tls.startswith("^"):
        return [name for name in _STORES_BY_SOURCE if name not in names]
    return [name for name in names if name in (*_STORES_BY_SOURCE, *_ALIASES_WITH_THEM)]


def nixl_problem() -> str:
    """The reason why NIXL can't be used here, and what to do; "" when it can."""
    if _wheel() is None:
        return "the package nixl-cu13 (or nixl-cu12) is not installed: pip install 'tandem-serve[nixl]'"
    unsafe = unsafe_ways(os.environ.get("UCX_TLS") or DEFAULT_UCX_TLS)
    if unsafe:
        return f"UCX_TLS allows {', '.join(unsafe)}, by which a fenced node could still write: leave them out"
    return ""


def _wheel() -> str | None:
    version = torch.version.cuda or "13"
    names = sorted(("nixl_cu13", "nixl_cu12"), key=lambda name: not name.endswith(version.partition(".")[0]))
    return next((name for name in names if importlib.util.find_spec(name) is not None), None)


def load_nixl() -> Any:
    """Loads the wheel's API module. Raises TransportError."""
    wheel = _wheel()
    os.environ.setdefault("UCX_TLS", DEFAULT_UCX_TLS)
    problem = nixl_problem()
    if wheel is None or problem:
        raise TransportError(problem)
    try:
        api = importlib.import_module(f"{wheel}._api")
    except ImportError as error:
        raise TransportError(f"{wheel} can't be loaded: {error}") from error
    logging.getLogger("nixl").setLevel(logging.WARNING)  # it reports each agent on stdout
    return api


class NixlAgent:
    """One agent, of one thread. `close` returns when nobody can reach memory through it any more."""

    def __init__(self) -> None:
        api = load_nixl()
        config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self.name = f"tandem-{secrets.token_hex(8)}"
        try:
            with _make_lock:  # plugins and environment belong to the whole process
                self._agent: Any = api.nixl_agent(self.name, config)
        except Exception as error:
            raise TransportError(f"NIXL can't start an agent with UCX: {error}") from error

    def register(self, memory: torch.Tensor) -> None:
        """Registers the storage of `memory` from its first element on. Raises TransportError."""
        nbytes = memory.untyped_storage().nbytes() - memory.storage_offset() * memory.element_size()
        try:
            self._agent.register_memory([(memory.data_ptr(), nbytes, device_id(memory), "")], memory_type(memory))
        except Exception as error:
            raise TransportError(f"NIXL can't register {nbytes} bytes of {memory.device}: {error}") from error

    def metadata(self) -> bytes:
        return self._agent.get_agent_metadata()

    def add_peer(self, metadata: bytes) -> str:
        return self._agent.add_remote_agent(metadata)

    def start_write(
        self, peer: str, local: np.ndarray, local_type: str, remote: np.ndarray, remote_type: str
    ) -> tuple[Any, bool]:
        """Starts to write `local` into `remote` memory of `peer`, both uint64 [n, 3] of (address, bytes, device).
        Returns a handle, and whether the write is complete already."""
        agent = self._agent
        handle = agent.initialize_xfer(
            "WRITE", agent.get_xfer_descs(local, local_type), agent.get_xfer_descs(remote, remote_type), peer
        )
        return handle, self._is_done(agent.transfer(handle))

    def is_complete(self, handle: Any) -> bool:
        """Drives the transfer and returns whether it is complete. Raises when it has failed."""
        return self._is_done(self._agent.check_xfer_state(handle))

    def progress(self) -> None:
        self._agent.get_new_notifs()

    def close(self) -> None:
        """Idempotent. The library's object ends with its last reference; handles must be released before."""
        self._agent = None

    @staticmethod
    def _is_done(state: str) -> bool:
        if state == "ERR":
            raise TransportError("NIXL reports a failed transfer")
        return state == "DONE"


def memory_type(memory: torch.Tensor) -> str:
    return "VRAM" if memory.is_cuda else "DRAM"


def device_id(memory: torch.Tensor) -> int:
    return memory.get_device() if memory.is_cuda else 0
