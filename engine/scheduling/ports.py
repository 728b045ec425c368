"""Protocols of what the scheduler and its loop use and others implement. No torch at run time."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Protocol

from tandem.engine.scheduling.step import RunnerOutput, SchedulerOutput, StepMeta

if TYPE_CHECKING:
    import torch

    from tandem.engine.scheduling.request import Request


BetweenLayers = Callable[[int], None]
"""Called while a step with hand-offs is launched, after each layer, with the number of layers that are launched."""


class StepHandle(Protocol):
    """A launched step. `result()` blocks until its sampled tokens are on the host."""

    step_id: int

    def sample(self) -> None:
        """Launches the drawing of tokens where it was left for when the step before has been read. Idempotent."""

    def result(self) -> RunnerOutput: ...

    def done(self) -> bool: ...


class Fellows(Protocol):
    """Other nodes that compute a part of each step of this one, so that all launch as many."""

    @property
    def is_behind(self) -> bool:
        """Whether another node has begun a step that this one hasn't."""

    def accompany(self) -> None:
        """Launches a step without requests."""


class Runner(Protocol):
    """Executes steps in order on one stream. `execute` only enqueues on a GPU; on CPU it may compute at once."""

    def execute(self, output: SchedulerOutput, between_layers: BetweenLayers | None = None) -> StepHandle: ...


class KVConnectorScheduler(Protocol):
    """Scheduler half of a connector. Called from the step loop only; never blocks.

    It shares no state with the worker half but the object that `build_connector_meta` returns.
    """

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """How many tokens beyond `num_computed_tokens` will come from outside (0: none, start now); None: not yet,
        leave it waiting, let others pass and ask again at the next step. Called at each step that has a slot and blocks
        for `request`. A source sends its KVClaim on the first call. No side effect on blocks."""

    def is_granted(self, request: Request) -> bool:
        """Whether the sink holds blocks for `request`. Prompts that are parked here may wait for just those, so it
        passes whoever waits for parked ones to leave."""

    def update_state_after_alloc(self, request: Request, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """Called when `request` starts, with all blocks that its prompt needs; it is never preempted. Blocks for
        external tokens were grantable: the connector may write them at once."""

    def build_connector_meta(self, output: SchedulerOutput) -> StepMeta | None:
        """Called once a step after scheduling, before launch. The result travels as `output.connector_meta`."""

    def request_finished(self, request: Request, block_ids: Sequence[int]) -> bool:
        """Called when `request` leaves the scheduler for good. True: the connector owns `block_ids` from now on and
        gives each back through `BlockPool.free` when no transfer reads it any more. False: free them now."""


class KVConnectorWorker(Protocol):
    """Worker half, bound to one device pool. Also the object behind the layer hooks of tandem.kernels."""

    def register_kv_cache(self, pool: torch.Tensor) -> None:
        """Takes the pool, `[num_blocks, heads, layers, planes, block_size, head_dim]`; called once, before the first
        step."""

    def start_load_kv(self, meta: StepMeta, between_layers: BetweenLayers | None) -> None:
        """Binds metadata and starts asynchronous loads; before a step that has any."""

    def wait_for_kv_layer(self, layer_name: str) -> None:
        """Called inside the attention op, before the layer reads its KV. Enqueues a wait; behind `settle` it blocks."""

    def settle(self) -> None:
        """Called before something is launched that may need a kernel which this process has not loaded: loading waits
        for what runs, and holds all launches. Blocks until no earlier step waits for a peer; what the running step
        needs of one is waited for on the host, layer by layer."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: object) -> None:
        """Called inside the attention op, after the layer wrote its KV. Enqueues the push of that layer; never
        blocks."""

    def wait_for_save(self) -> None:
        """Enqueues everything saved in this step and unbinds metadata; after the forward pass of each step."""

    def spoiled_slots(self, step_id: int) -> dict[int, str]:
        """Asked once a step with metadata has run: the slots whose rows lacked KV that did not come, and why."""


Taker = Hashable  # whoever takes blocks from below: a Request, or what stands for a peer that asks


class LowerTiers(Protocol):
    """KV of this node below the device pool, as the planner sees it. Called from the step loop only; never blocks. What
    it holds for requests that have not started it gives back when it is asked (`BlockPool.reservations`): they compute
    what they don't find."""

    def prepare(
        self, taker: Taker, hashes: Sequence[bytes], hits: Sequence[int], runs_alone: bool, num_taken: int = 0
    ) -> int | None:
        """How many tokens after the hits are loaded under `taker`'s first step (0 unless `runs_alone`); None: something
        is being loaded that it will find, or what it pushes out is being saved, ask again. Called whenever it could
        start: there are a slot and blocks for all of it. `hashes` are what it may take from a cache, `hits` the blocks
        that the pool has of them. `num_taken`: so many others it then takes at once, if it takes many."""

    def load_with_step(self, request: Request, block_ids: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Hears that `request` starts with the next step, which loads these blocks. They are its own, and were
        grantable."""

    def step_meta(self, step_id: int, meta: StepMeta | None) -> StepMeta | None:
        """The step's connector metadata, with its loads."""

    def started(self, taker: Taker, hashes: Sequence[bytes]) -> None:
        """Hears that `taker` has references of its own to what was found or loaded."""

    def ended(self, taker: Taker) -> None:
        """Hears that `taker`, whether it has started or not, needs nothing any more. Idempotent."""

    def flush(self) -> None:
        """Forgets whatever nobody uses."""

    def check_integrity(self) -> None: ...


class PromptShares(Protocol):
    """Prompts that several nodes compute, chunk by chunk. Called from the step loop only; never blocks."""

    def next_part(self, request: Request, room: int) -> tuple[int, int] | None:
        """(begin, end) of the tokens that are to be computed here next, after those that others compute; None: not yet.
        Called whenever `request`, which has help and all its blocks, could have a row of a step that has about `room`
        tokens for all prompts. May find that the request goes alone."""

    def step_meta(self, step_id: int, meta: StepMeta | None) -> StepMeta | None:
        """The step's connector metadata, with chunks that leave and come."""

    def ended(self, request: Request) -> None:
        """Called when any request leaves the scheduler for good, with its blocks."""


class NoShares:
    """PromptShares of a node that computes all its prompts alone."""

    def next_part(self, request: Request, room: int) -> tuple[int, int] | None:
        raise AssertionError("nobody helps")

    def step_meta(self, step_id: int, meta: StepMeta | None) -> StepMeta | None:
        return meta

    def ended(self, request: Request) -> None: ...


class NoTiers:
    """LowerTiers of a node that has none."""

    def prepare(
        self, taker: Taker, hashes: Sequence[bytes], hits: Sequence[int], runs_alone: bool, num_taken: int = 0
    ) -> int | None:
        return 0

    def load_with_step(self, request: Request, block_ids: Sequence[int], hashes: Sequence[bytes]) -> None:
        raise AssertionError("there is nothing to load")

    def step_meta(self, step_id: int, meta: StepMeta | None) -> StepMeta | None:
        return meta

    def started(self, taker: Taker, hashes: Sequence[bytes]) -> None: ...

    def ended(self, taker: Taker) -> None: ...

    def flush(self) -> None: ...

    def check_integrity(self) -> None: ...
