"""Worker half of the connector: turns a step's metadata into jobs of the transfer thread, from inside the forward pass.

All methods run on the thread that executes steps. Nothing here blocks but waits for a peer's KV, on CPU or once what
follows may load a kernel (`settle`): on CUDA an event recorded on the current stream travels with each job and the
transfer thread's stream waits for it; on CPU a layer is written when its hook runs. What is pushed does not change
later: blocks are complete, and of a partial last block only its valid slots move.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import torch

from tandem.engine.contracts.kv_layout import LayerPlace, push_groups
from tandem.engine.scheduling.ports import BetweenLayers
from tandem.engine.scheduling.step import StepMeta
from tandem.kv_connector.protocol.jobs import BlockPush, LayerLoad, LoadEvent, StepMoves
from tandem.kv_connector.transfer.arrivals import LayersWait
from tandem.kv_connector.transfer.layer_order import LayerOrder
from tandem.kv_connector.transfer.thread import TransferWorker

KEPT_STEPS = 4  # at most two launched steps are unread, so older ones have run


class ConnectorWorker:
    """Implements KVConnectorWorker of engine/scheduling/ports.py. `places` says where the pool has the KV of each
    attention layer, in the order of layers."""

    def __init__(self, transfer: TransferWorker, places: Mapping[str, LayerPlace], lags: bool = False) -> None:
        """`lags`: other ranks write the KV as well. That this rank has begun a layer proves that all have written the
        one before, since they have added up their parts of it; the end of the step proves the last."""
        self._transfer = transfer
        self._pool_layer_of = {name: place.layer for name, place in places.items()}
        self._index_of = {name: index for index, name in enumerate(places)}
        self._tables = [place.table for place in places.values()]
        self._meta: StepMoves | None = None  # the moves of the running step, if it pushes
        self._between_layers: BetweenLayers | None = None
        self._lags = lags
        self._newest_layer: int | None = None  # of the model
        num_pool_layers = transfer.pool.shape[2]
        self._groups, self._order = push_groups(num_pool_layers), LayerOrder(list(places.values()), num_pool_layers)
        # An event takes the launching thread microseconds: one a group will do, unless somebody looks at each layer.
        self._records_each = lags or transfer.is_traced or not transfer.pool.is_cuda
        # For the layers of each table's group that is not complete.
        self._written: dict[int, list[torch.cuda.Event | None]] = {table: [] for table in self._tables}
        self._load_events: dict[int, list[LoadEvent]] = {}  # by layer of the pool
        self._arrivals: dict[int, list[LayersWait]] = {}  # by layer of the model
        self._waits_on_host = False
        self._step_id = math.inf  # of the running step, if it has metadata
        self._layer_events: list[torch.cuda.Event | None] = []  # of the running step, as far as its layers have come
        # CUDA: events of the last steps with hand-offs, of each layer or the last of a group; or one for all layers.
        self._steps: OrderedDict[int, list[torch.cuda.Event | None]] = OrderedDict()

    def register_kv_cache(self, pool: torch.Tensor) -> None:
        assert pool.data_ptr() == self._transfer.pool.data_ptr(), "the connector moves the pool that the model writes"
        self._transfer.warm_up()

    def start_load_kv(self, meta: StepMeta, between_layers: BetweenLayers | None = None) -> None:
        assert self._meta is None, "wait_for_save ends a step before the next one starts"
        assert isinstance(meta, StepMoves), f"no part of this connector made {meta}"
        self._step_id, self._waits_on_host = meta.step_id, False
        self._start_loads(meta.loads)
        self._arrivals.update(self._transfer.arrivals.waits(meta.step_id, meta.arriving))
        if meta.is_pushed:
            self._meta, self._between_layers = meta, between_layers
            self._queue_whole([push for push in meta.whole if push.step_id < meta.step_id])

    def settle(self) -> None:
        self._waits_on_host = True
        self._transfer.arrivals.settle(self._step_id)

    def wait_for_kv_layer(self, layer_name: str) -> None:
        if self._load_events or self._arrivals:
            self._wait_for_load(self._pool_layer_of[layer_name])
            self._wait_for_peers(self._index_of[layer_name])

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: object) -> None:
        if self._meta is None:
            return
        layer = self._index_of[layer_name]
        is_recorded = self._records_each or layer in self._order.pushed
        written = self._record_event() if is_recorded else None
        self._layer_events.append(written)
        if self._lags:
            self._push_layer(self._newest_layer, written)
            self._newest_layer = layer
        else:
            self._push_layer(layer, written)
        if self._between_layers is not None and is_recorded:
            self._between_layers(len(self._layer_events))

    def wait_for_save(self) -> None:
        done = self._record_event()
        if self._newest_layer is not None:
            self._push_layer(self._newest_layer, done)
            self._newest_layer = None
        meta, self._meta = self._meta, None
        for layer in list(self._load_events):  # that this step did not run: no load outlives its step
            self._wait_for_load(layer)
        for layer in list(self._arrivals):
            self._wait_for_peers(layer)
        self._transfer.note_step_launched(done)
        self._step_id = math.inf
        for written in self._written.values():
            written.clear()
        layer_events, self._layer_events = self._layer_events, []
        if self._lags:
            layer_events = [*layer_events[1:], done]
        if meta is not None:
            self._keep_step(meta, layer_events, done)
            self._queue_whole([push for push in meta.whole if push.step_id >= meta.step_id])

    def spoiled_slots(self, step_id: int) -> dict[int, str]:
        return self._transfer.arrivals.spoiled(step_id)

    def push_between_steps(self, push: BlockPush) -> None:
        """A push that travels with no step: its grant came late. If the step that writes its blocks may still run, each
        layer follows as soon as that is done; if it has run, at once, whatever other step runs now."""
        events = self._steps.get(push.step_id)
        if events is None:
            has_run = push.step_id < 0 or (bool(self._steps) and push.step_id < next(iter(self._steps)))
            self._transfer.submit(push, waits=not has_run)
        elif (newest := events[-1]) is not None and newest.query():
            self._transfer.submit(push, waits=False)
        elif len(events) < len(self._tables) or len(self._written) > 1:
            self._transfer.submit(push, events[-1])
        else:
            for layers in self._groups:
                self._transfer.submit_layers(push, layers, events[layers.start : layers.stop])

    def _keep_step(
        self, meta: StepMoves, layer_events: Sequence[torch.cuda.Event | None], done: torch.cuda.Event | None
    ) -> None:
        """Keeps a step's events: those of its layers, or one for all if the step ran as a whole."""
        if done is None:
            return
        if len(layer_events) == len(self._tables):
            self._steps[meta.step_id] = list(layer_events)
        elif not meta.by_layer:
            self._steps[meta.step_id] = [done]
        while len(self._steps) > KEPT_STEPS:
            self._steps.popitem(last=False)

    def _push_layer(self, layer: int | None, written: torch.cuda.Event | None) -> None:
        """Adds a layer to its group, and pushes the group when it is complete."""
        if self._meta is None or layer is None:
            return
        table = self._tables[layer]
        self._written[table].append(written)
        if (group := self._order.pushed.get(layer)) is not None:
            num_told = self._order.told.get(layer, 0)
            for push in self._meta.pushes:
                if push.table == table:
                    self._transfer.submit_layers(push, group, tuple(self._written[table]), num_told)
            self._written[table].clear()

    def _start_loads(self, loads: Sequence[LayerLoad]) -> None:
        for load in loads:
            for layer, event in load.start(self._transfer.pool).items():
                self._load_events.setdefault(layer, []).append(event)

    def _wait_for_load(self, layer: int) -> None:
        for event in self._load_events.pop(layer, ()):
            event.wait()

    def _wait_for_peers(self, layer: int) -> None:
        for arrival in self._arrivals.pop(layer, ()):
            if self._waits_on_host:
                arrival.on_host()
            else:
                arrival.on_stream()

    def _queue_whole(self, pushes: Sequence[BlockPush]) -> None:
        if pushes:
            written = self._record_event()
            for push in pushes:
                self._transfer.submit(push, written)

    def _record_event(self) -> torch.cuda.Event | None:
        if not self._transfer.pool.is_cuda:
            return None
        event = torch.cuda.Event(enable_timing=self._transfer.is_traced)
        event.record()
        return event
