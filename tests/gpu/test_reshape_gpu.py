"""Hand-offs from and into CUDA pools of unlike layouts: staged by gathers on the transfer thread's stream."""

from __future__ import annotations

import pytest
import torch

from tandem.kernels.blocks.quantization import as_bytes
from tandem.kv_connector.layouts.reshape import STAGED_BYTES
from tests.fakes.kv_pools import make_layout
from tests.fakes.reshaped_handoff import UNLIKE_NUMBERS, Handoff, layout_id

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
BLOCKS = [(make_layout(block_size=ours), make_layout(block_size=theirs)) for ours, theirs in ((4, 8), (8, 4), (12, 8))]


@pytest.mark.parametrize(("ours", "theirs"), [*BLOCKS, *UNLIKE_NUMBERS], ids=layout_id)
@pytest.mark.parametrize(
    ("transport", "devices"),
    [("local", ("cuda", "cuda")), ("tcp", ("cuda", "cuda")), ("tcp", ("cuda", "cpu")), ("tcp", ("cpu", "cuda"))],
)
def test_what_arrives_is_what_the_sink_would_have_stored(transport, devices, ours, theirs, monkeypatch):
    for device in STAGED_BYTES:
        monkeypatch.setitem(STAGED_BYTES, device, 3 * theirs.payload_bytes)
    handoff = Handoff(transport, ours, theirs, devices=devices)
    try:
        handoff.push()
        assert handoff.check() == ()
        assert torch.equal(as_bytes(handoff.sink.node.pool.cpu()), as_bytes(handoff.expected()))
    finally:
        handoff.close()
