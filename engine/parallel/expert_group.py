"""A group of nodes each of which has attention whole, requests of its own and some of a model's experts
(docs/expert_groups.md).

T tokens of a pass on this node, C the capacity of its exchanges, R nodes, E hidden size, k experts of a token.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tandem.engine.parallel.peer_memory import share
from tandem.engine.parallel.rendezvous import STUCK_S, find_store, gathered, linked, make_store
from tandem.engine.parallel.sharding import Shard
from tandem.engine.parallel.step_agreement import StepAgreement
from tandem.kernels.experts.exchange import (
    Arrived,
    ExchangeLayout,
    ExpertMail,
    Sent,
    combine_twin,
    dispatch_twin,
)
from tandem.kernels.experts.plans import NOT_HERE

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class GroupPlace:
    """A node's place in its group, and the port on this host where its nodes meet, at that of rank 0."""

    rank: int
    size: int
    port: int


class ExpertGroup:
    """One node's end of its group. Until `begin_serving` it computes alone, without what others' experts make.

    On GPUs tokens go through the members' memory (kernels/experts/exchange.py), on CPU through gloo.
    """

    def __init__(
        self, place: GroupPlace, links: Mapping[int, socket.socket], store: Any, device: torch.device, max_rows: int
    ) -> None:
        self.rank, self.size, self.device = place.rank, place.size, device
        self._max_rows = max_rows
        self.agreement = StepAgreement(links)
        self._store = store
        self._layout: ExchangeLayout | None = None
        self._mail: ExpertMail | None = None
        self._gloo: Any = None
        self._ladder: tuple[int, ...] = ()
        self._is_serving = False
        self.capacity: int | None = None  # of the step that is launched; None: as many places as a pass has tokens

    @classmethod
    def join(cls, place: GroupPlace, device: torch.device, max_rows: int) -> ExpertGroup:
        """A collective: meets the other nodes. `max_rows`: of a step of any node. Raises OSError and ConfigError."""
        store = make_store(place.port) if place.rank == 0 else find_store(place.port)
        group = cls(place, linked(place.rank, place.size, store), store, device, max_rows)
        if device.type == "cpu":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host: nobody else needs to reach a node
            within = timedelta(seconds=STUCK_S)
            group._gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), place.rank, place.size, within)  # type: ignore[attr-defined]
        return group

    @property
    def shard(self) -> Shard:
        """What of a model this node holds."""
        return Shard(expert_parallel=True, group_rank=self.rank, group_size=self.size)

    def open(self, hidden_size: int, top_k: int, num_experts: int, dtype: torch.dtype) -> None:
        """A collective: makes room for exchanges of a model. Raises TransportError where GPUs of this host can't reach
        each other's memory."""
        self._layout = layout = ExchangeLayout(self.size, self._max_rows, hidden_size, top_k, num_experts, dtype)
        if self.device.type == "cpu":
            return
        memory = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=self.device)
        torch.cuda.synchronize(self.device)  # zeroed before another node may write
        addresses = [each.address for each in share(self.rank, memory, self._gathered_tickets)]
        self._mail = ExpertMail(self.rank, memory, addresses, layout)

    @property
    def is_open(self) -> bool:
        return self._layout is not None

    def replay(self, sizes: Sequence[int]) -> None:
        """Has steps of up to the last of these many rows take one of them as their capacity, for which there are
        graphs. All nodes must have the same."""
        self._ladder = tuple(sizes)

    def begin_serving(self) -> None:
        """Has the others take part from the next step on, which is the first that all agree on."""
        if self._mail is not None:
            self._mail.join()
            torch.cuda.synchronize(self.device)
        self._is_serving = True

    @property
    def is_serving(self) -> bool:
        return self._is_serving

    def begin_step(self, rows: int) -> int:
        """Begins a step together with all others, with so many rows of this node, and returns its capacity. Raises what
        `StepAgreement.agree` does."""
        self.capacity = self.agreement.agree(next((size for size in self._ladder if size >= rows), rows))
        return self.capacity

    def mixture(
        self, x_TE: torch.Tensor, ids_Tk: torch.Tensor, weights_Tk: torch.Tensor, slots_T: torch.Tensor | None,
        compute: Compute,
    ) -> torch.Tensor:  # fmt: skip
        """[T, E]: what all nodes' experts make of this node's tokens. `ids_Tk` int32: of all experts; `weights_Tk`
        fp32; `slots_T` int64, below 0: padding. `compute(x, ids, weights)`: a mixture of this node's experts, which
        counts its own from 0; NOT_HERE among the ids adds nothing."""
        capacity = max(1, len(x_TE)) if self.capacity is None else self.capacity
        assert len(x_TE) <= capacity, f"{len(x_TE)} rows in a step of {capacity}"
        if self._mail is None:
            return self._through_gloo(x_TE, ids_Tk, weights_Tk, slots_T, compute, capacity)
        sent = Sent(ids_Tk, slots_T, capacity)
        arrived = self._mail.dispatch(x_TE, weights_Tk, sent)
        return self._mail.combine(compute(arrived.x, arrived.ids, arrived.weights), sent)

    def leave(self) -> None:
        """Ends this node's part, once all have left the agreement."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # others may have written here until its last step ended
        self.agreement.close()

    def _through_gloo(
        self, x_TE: torch.Tensor, ids_Tk: torch.Tensor, weights_Tk: torch.Tensor, slots_T: torch.Tensor | None,
        compute: Compute, capacity: int,
    ) -> torch.Tensor:  # fmt: skip
        assert self._layout is not None, "opened when the model was made"
        if slots_T is not None and self._is_serving:
            ids_Tk = torch.where(slots_T[:, None] < 0, NOT_HERE, ids_Tk)
        missing = capacity - len(x_TE)
        x_CE = torch.nn.functional.pad(x_TE, (0, 0, 0, missing))
        ids_Ck = torch.nn.functional.pad(ids_Tk, (0, 0, 0, missing), value=NOT_HERE)
        weights_Ck = torch.nn.functional.pad(weights_Tk, (0, 0, 0, missing))
        if not self._is_serving:
            alone = self._here(x_CE[None], ids_Ck[None], weights_Ck[None])
            return compute(alone.x, alone.ids, alone.weights)[: len(x_TE)]
        arrived = self._here(*(self._gathered(each) for each in (x_CE, ids_Ck, weights_Ck)))
        parts_RPE = self._gathered(compute(arrived.x, arrived.ids, arrived.weights))
        return combine_twin(parts_RPE.unflatten(1, (self.size, capacity))[:, self.rank, : len(x_TE)])

    def _here(self, x_RCE: torch.Tensor, ids_RCk: torch.Tensor, weights_RCk: torch.Tensor) -> Arrived:
        assert self._layout is not None
        return dispatch_twin(x_RCE, ids_RCk, weights_RCk, (self.rank, self.size), self._layout.num_experts)

    def _gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        """Every node's tensor, [R, *shape], in the order of ranks."""
        every = [torch.empty_like(tensor) for _ in range(self.size)]
        self._gloo.allgather([every], [tensor.contiguous()]).wait()
        return torch.stack(every)

    def _gathered_tickets(self, ticket: torch.Tensor) -> torch.Tensor:
        every = gathered(self._store, "memory", self.rank, self.size, bytes(ticket.cpu().numpy()))
        return torch.stack([torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in every])
