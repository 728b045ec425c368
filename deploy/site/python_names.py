"""The reference of Python's names: pages that have mkdocstrings show modules with their docstrings."""

from __future__ import annotations

# Title, what the page is about, modules.
PAGES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "reference/python.md": (
        "Python API",
        "What `from tandem import …` gives. How to use it: [docs/python.md](../docs/python.md).",
        (
            "tandem.llm.llm",
            "tandem.llm.async_llm",
            "tandem.llm.params",
            "tandem.llm.outputs",
            "tandem.llm.lora_request",
            "tandem.llm.multi_modal",
            "tandem.engine.contracts.errors",
        ),
    ),
    "reference/contracts.md": (
        "Contracts",
        "What nodes and routers agree on: options, parameters of a request, hashes, and every message between them.",
        (
            "tandem.engine.contracts.config",
            "tandem.engine.contracts.sampling_params",
            "tandem.engine.contracts.hashing",
            "tandem.engine.contracts.kv_layout",
            "tandem.engine.contracts.directory",
            "tandem.engine.contracts.wire.connection",
            "tandem.engine.contracts.wire.requests",
            "tandem.engine.contracts.wire.handoff",
        ),
    ),
    "reference/connector.md": (
        "KV connector",
        "What moves KV between nodes ([docs/protocol.md](../docs/protocol.md)): the tables of a hand-off, their words, "
        "and the contract of a transport ([docs/transports.md](../docs/transports.md)).",
        (
            "tandem.kv_connector.protocol.source_table",
            "tandem.kv_connector.protocol.sink_table",
            "tandem.kv_connector.protocol.effects",
            "tandem.kv_connector.source.manager",
            "tandem.kv_connector.sink.manager",
            "tandem.kv_connector.transports.base",
        ),
    ),
    "reference/kernels.md": (
        "Kernels",
        "Attention over paged KV, usable without the rest of Tandem ([docs/kernels.md](../docs/kernels.md)).",
        (
            "tandem.kernels.api.attention",
            "tandem.kernels.api.unified_attention",
            "tandem.kernels.api.paged_attention",
            "tandem.kernels.api.metadata",
            "tandem.kernels.api.spec",
            "tandem.kernels.api.backend",
            "tandem.kernels.api.selection",
            "tandem.kernels.api.forward_context",
            "tandem.kernels.api.errors",
        ),
    ),
}


def python_pages() -> dict[str, str]:
    """Markdown by the page's path."""
    return {
        path: "\n\n".join([f"# {title}", text, *(f"::: {module}" for module in modules)])
        for path, (title, text, modules) in PAGES.items()
    }
