"""What the ranks of a tensor-parallel node compute together.

Everything here is a collective: every rank calls it at the same point of the same step. Legend: N rows, E hidden
size, V vocabulary, R ranks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tandem.engine.parallel.peer_memory import RankMemory, open_mail, share
from tandem.engine.parallel.rendezvous import STUCK_S, find_store
from tandem.engine.parallel.sharding import Shard
from tandem.engine.parallel.stand_in import StandIn
from tandem.kernels.products.all_reduce import Mail, MailLayout, argmax_of_shards, sum_add_rms_norm
from tandem.kernels.products.fused_ops import add_rms_norm, argmax_tokens

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed in torch 2.13


@dataclass(frozen=True)
class Membership:
    """A rank's place in its node, and the port on this host where ranks find each other, at rank 0's `store`."""

    shard: Shard
    port: int
    store: object | None = None


class TensorParallel:
    """One rank's end of the group. Each process has one.

    Rows go through the peers' memory (kernels/products/all_reduce.py), or through NCCL when they are more than its mail
    holds. On CPU everything goes through gloo. Each way gives every rank the same bits.
    """

    def __init__(self, shard: Shard, device: torch.device) -> None:
        self.shard = shard
        self.device = device
        self._mail: Mail | None = None
        self._nothing_1E: torch.Tensor | None = None  # what is summed only to know that all ranks have come so far
        self.num_exchanges = 0  # of the newest step; a graph's are counted by who replays it
        self._stand_in: StandIn | None = None

    @classmethod
    def join(
        cls,
        membership: Membership,
        device: torch.device,
        max_rows: int,
        hidden_size: int,
        dtype: torch.dtype,
    ) -> TensorParallel:
        """Meets the other ranks. `max_rows`: the most rows of an exchange through peers' memory."""
        shard, on_gpu = membership.shard, device.type == "cuda"
        os.environ["NCCL_NVLS_ENABLE"] = "0"  # NVLink multicast: one process that misuses it can stop a whole host
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")  # one host: nobody else needs to reach a rank
        timeout = timedelta(seconds=STUCK_S)
        store: Any = find_store(membership.port) if membership.store is None else membership.store
        dist.init_process_group(
            "nccl" if on_gpu else "gloo", store=store, rank=shard.rank, world_size=shard.size, timeout=timeout,
            device_id=device if on_gpu else None,
        )  # fmt: skip
        group = cls(shard, device)
        if on_gpu:
            layout = MailLayout(shard.size, max_rows, hidden_size, dtype)
            group._mail = open_mail(shard.rank, device, group._gathered, layout)
            group._compile_sums(group._mail)
        return group

    def _compile_sums(self, mail: Mail) -> None:
        """Does one exchange in every way that steps can take, so that no step waits for a compiler."""
        layout = mail.layout
        stream_E = torch.zeros((1, layout.hidden_size), dtype=layout.dtype, device=self.device)
        self._nothing_1E = stream_E
        for way in layout.ways:
            sum_add_rms_norm(mail, stream_E, stream_E, stream_E[0], 1.0, way)

    def leave(self) -> None:
        """Leaves the group, on CPU only: NCCL's own way out waits for ranks that may be gone, and the process ends
        anyway."""
        if self.device.type == "cpu":
            dist.destroy_process_group()

    def begin_step(self) -> None:
        """Begins another step: the exchanges from here on are counted from 0."""
        self.num_exchanges, self._stand_in = 0, None

    def stand_in(self, rows: Mapping[int, int]) -> None:
        """Makes this rank give zeros for the rest of a step that it has no memory for: `rows[n]` rows to an exchange to
        which it comes with n. The exchanges in which it has taken part already are passed over."""
        if self._stand_in is None:
            self._stand_in = StandIn(rows, self.num_exchanges)
        self._stand_in.rows = rows

    def replayed(self, num_exchanges: int) -> None:
        """Counts the exchanges of a graph."""
        self.num_exchanges += num_exchanges

    @property
    def most_captured_rows(self) -> int | None:
        """Rows of the largest exchange that a graph may have, since larger ones go by NCCL; None: any number."""
        return None if self._mail is None else self._mail.layout.row_lanes

    def sum_add_rms_norm(
        self, x_NE: torch.Tensor, residual_NE: torch.Tensor, weight_E: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """residual += sum of the ranks' x, in place; the new residual normalised. `x_NE` is overwritten."""
        if self._stand_in is None:
            return self._sum_add_rms_norm(x_NE, residual_NE, weight_E, eps)
        self._stand_in.give(x_NE, lambda x: self._sum_add_rms_norm(x, torch.zeros_like(x), weight_E, eps))
        return add_rms_norm(x_NE, residual_NE, weight_E, eps)

    def sum(self, x_NE: torch.Tensor) -> torch.Tensor:
        """[N, E]: the sum of the ranks' x, which is overwritten."""
        if self._stand_in is None:
            return self._sum(x_NE)
        self._stand_in.give(x_NE, self._sum)
        return x_NE

    def argmax(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """int64 [N]: the most likely token of the whole vocabulary, the lowest id of equals."""
        if self._stand_in is None:
            return self._argmax(logits_NV)
        self._stand_in.give(logits_NV, self._argmax)
        return torch.zeros(len(logits_NV), dtype=torch.int64, device=self.device)

    def gather_logits(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """Logits [N, V], put together from every rank's run of the vocabulary."""
        if self._stand_in is None:
            return self._gathered(logits_NV).transpose(0, 1).flatten(1)
        self._stand_in.give(logits_NV, self._gathered)
        return logits_NV.repeat(1, self.shard.size)

    def gather_rows(self, own_NE: torch.Tensor) -> torch.Tensor:
        """[R * N, E]: the ranks' rows, in their order; not within a step."""
        return self._gathered(own_NE).flatten(0, 1)

    def from_rank_0(self, tensor: torch.Tensor) -> torch.Tensor:
        """Overwrites `tensor` with rank 0's content and returns it."""
        if self._stand_in is None:
            return self._from_rank_0(tensor)
        self._stand_in.give(tensor, self._from_rank_0)
        return tensor

    def end_step(self, num_sampled: int) -> None:
        """Orders what follows on rank 0's device after every rank's part of the step, so that others may use its KV. A
        step that samples needs nothing, since the ranks sample together. On CPU it is a barrier."""
        if self.device.type == "cpu":
            dist.barrier()
        elif not num_sampled:
            assert self._nothing_1E is not None, "made when the group was joined"
            self._sum_add_rms_norm(self._nothing_1E, self._nothing_1E, self._nothing_1E[0], 1.0)

    def share_memory(self, memory: torch.Tensor) -> list[RankMemory]:
        """A collective on GPUs that returns every rank's `memory`, in the order of ranks, mapped for as long as they
        live. Raises TransportError where GPUs of this host can't reach each other's memory."""
        return share(self.shard.rank, memory, self._gathered)

    def smallest(self, value: int) -> int:
        """The least of the ranks' values; waits for all."""
        holder = torch.tensor([value], dtype=torch.int64, device=self.device)
        dist.all_reduce(holder, op=dist.ReduceOp.MIN)
        return int(holder)

    # --- one exchange each, counted once it is launched -----------------------------------------------------------

    def _sum_add_rms_norm(
        self, x_NE: torch.Tensor, residual_NE: torch.Tensor, weight_E: torch.Tensor, eps: float
    ) -> torch.Tensor:
        if self._mail is not None and (way := self._mail.way(x_NE)) is not None:
            normed_NE = sum_add_rms_norm(self._mail, x_NE, residual_NE, weight_E, eps, way)
            self.num_exchanges += 1
            return normed_NE
        self._all_reduce(x_NE)
        return add_rms_norm(x_NE, residual_NE, weight_E, eps)

    def _sum(self, x_NE: torch.Tensor) -> torch.Tensor:
        if self._mail is not None and (way := self._mail.way(x_NE)) is not None:
            assert self._nothing_1E is not None, "made when the group was joined"
            total_NE = torch.zeros_like(x_NE)
            sum_add_rms_norm(self._mail, x_NE, total_NE, self._nothing_1E[0], 1.0, way)
            self.num_exchanges += 1
            return total_NE
        self._all_reduce(x_NE)
        return x_NE

    def _all_reduce(self, x_NE: torch.Tensor) -> None:
        if x_NE.shape[0]:
            dist.all_reduce(x_NE)
        self.num_exchanges += 1

    def _argmax(self, logits_NV: torch.Tensor) -> torch.Tensor:
        num_rows, shard_size = logits_NV.shape
        if self._mail is not None and num_rows <= self._mail.layout.max_rows:
            token_N = argmax_of_shards(self._mail, logits_NV)
            self.num_exchanges += 1
            return token_N
        own_N = argmax_tokens(logits_NV)
        peak_N = logits_NV.gather(1, own_N[:, None])[:, 0]
        own = torch.stack((peak_N.double(), (own_N + self.shard.rank * shard_size).double()))
        all_R2N = self._gathered(own)
        return all_R2N[:, 1].gather(0, all_R2N[:, 0].argmax(0, keepdim=True))[0].long()

    def _from_rank_0(self, tensor: torch.Tensor) -> torch.Tensor:
        dist.broadcast(tensor, src=0)
        self.num_exchanges += 1
        return tensor

    def _gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        """Every rank's tensor, [R, *shape], in the order of ranks."""
        out = tensor.new_empty((self.shard.size, *tensor.shape))
        _all_gather(out.flatten(0, 1), tensor.contiguous())
        self.num_exchanges += 1
        return out
