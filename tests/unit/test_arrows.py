"""Dependency arrows between the folders and purity of the sans-IO modules, read off the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("router", "prefill_node", "decode_node", "kv_connector", "kernels", "engine", "deploy")
ALLOWED = {
    "kernels": set(),
    "engine": {"kernels"},
    "kv_connector": {"engine", "kernels"},
    "prefill_node": {"engine", "kv_connector", "kernels"},
    "decode_node": {"engine", "kv_connector", "kernels"},
    "router": {"engine", "kv_connector"},
    "deploy": set(FOLDERS),
}
# What a router may import: contracts and pure logic, nothing that loads a model.
ROUTER_MAY = (
    "engine.config",
    "engine.descriptors",
    "engine.errors",
    "engine.generation_config",
    "engine.hashing",
    "engine.interfaces",
    "engine.kv_layout",
    "engine.launcher_pipe",
    "engine.messages",
    "engine.model_folder",
    "engine.process_log",
    "engine.sampling_params",
    "engine.security",
    "engine.version",
    "engine.watched",
    "engine.wire_decode",
    "kv_connector.directory",
)
SANS_IO = (
    "kv_connector/layer_groups.py",
    "kv_connector/waiting_layers.py",
    "kv_connector/tiers/write_back.py",
    "kv_connector/tiers/rates.py",
    "kv_connector/tiers/promotions.py",
    "kv_connector/tiers/promoter.py",
    "kv_connector/tiers/manager.py",
    "kv_connector/tiers/jobs.py",
    "kv_connector/tiers/index.py",
    "engine/tenants.py",
    "engine/parallel/collectives.py",
    "engine/parallel/sharding.py",
    "kv_connector/transports/landing_wire.py",
    "kernels/prefix_groups.py",
    "kernels/matmul_plans.py",
    "engine/block_pool.py",
    "engine/block_publication.py",
    "engine/config.py",
    "engine/control_events.py",
    "engine/core.py",
    "engine/errors.py",
    "engine/hashing.py",
    "engine/interfaces.py",
    "engine/kv_allocator.py",
    "engine/kv_layout.py",
    "engine/kv_messages.py",
    "engine/message_parts.py",
    "engine/messages.py",
    "engine/rate.py",
    "engine/request.py",
    "engine/request_book.py",
    "engine/sampling_params.py",
    "engine/scheduler.py",
    "engine/serving_node.py",
    "engine/scheduler_state.py",
    "engine/step.py",
    "engine/step_pace.py",
    "engine/step_times.py",
    "engine/turn_times.py",
    "engine/wire_decode.py",
    "engine/prompt_order.py",
    "engine/prefix_tree.py",
    "engine/step_builder.py",
    "engine/step_pieces.py",
    "engine/step_planner.py",
    "engine/stop.py",
    "kv_connector/action_queues.py",
    "kv_connector/grant_check.py",
    "kv_connector/handoff_node.py",
    "kv_connector/meta.py",
    "kv_connector/migration.py",
    "kv_connector/outcomes.py",
    "kv_connector/peer_effects.py",
    "kv_connector/plan.py",
    "kv_connector/pull_asker.py",
    "kv_connector/pull_holder.py",
    "kv_connector/pull_rates.py",
    "kv_connector/pull_record.py",
    "kv_connector/sink.py",
    "kv_connector/sink_actions.py",
    "kv_connector/sink_peers.py",
    "kv_connector/sink_queue.py",
    "kv_connector/sink_record.py",
    "kv_connector/source.py",
    "kv_connector/source_actions.py",
    "kv_connector/source_peers.py",
    "kv_connector/source_record.py",
    "kv_connector/ticket_loads.py",
    "kv_connector/directory/discovery.py",
    "kv_connector/directory/holders.py",
    "kv_connector/directory/mirror.py",
    "kv_connector/directory/own_view.py",
    "kv_connector/directory/records.py",
    "kv_connector/handoff/sink.py",
    "kv_connector/handoff/source.py",
    "router/orphans.py",
    "router/outbox.py",
    "router/migration_policy.py",
    "router/node_view.py",
    "router/placement.py",
    "router/placement_policies.py",
    "router/request_actions.py",
    "router/request_core.py",
    "router/request_machine.py",
    "router/request_moves.py",
    "router/request_parts.py",
    "deploy/simulated_node.py",
    "deploy/simulation.py",
    "deploy/supervisor.py",
    "deploy/trace.py",
    "deploy/trace_report.py",
)
IO_MODULES = {"torch", "zmq", "asyncio", "redis", "socket", "threading", "subprocess", "uvloop", "time"}


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def imports(path: Path, at_run_time: bool = False) -> Iterator[str]:
    """Full names of imported modules, those inside functions included; `at_run_time` leaves out type-only ones."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped: set[ast.AST] = set()
    if at_run_time:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                skipped.update(inner for child in node.body for inner in ast.walk(child))
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def tandem_imports(path: Path) -> Iterator[str]:
    return (name.removeprefix("tandem.") for name in imports(path) if name.startswith("tandem."))


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_follow_the_arrows(folder: str) -> None:
    files = sources(folder)
    assert files
    for path in files:
        for name in tandem_imports(path):
            target = name.partition(".")[0]
            assert target == folder or target in ALLOWED[folder], f"{path.relative_to(ROOT)} imports tandem.{name}"


def test_arrows_have_no_cycle() -> None:
    def reaches(start: str, goal: str) -> bool:
        return any(step == goal or reaches(step, goal) for step in ALLOWED[start])

    lower = {folder for folder in FOLDERS if folder != "deploy"}
    assert not [folder for folder in lower if reaches(folder, folder)]


def test_the_router_imports_contracts_and_the_directory_only() -> None:
    for path in sources("router"):
        for name in tandem_imports(path):
            assert name.startswith(("router.", *ROUTER_MAY)), f"{path.relative_to(ROOT)} imports tandem.{name}"


@pytest.mark.parametrize("name", SANS_IO)
def test_pure_modules_do_no_io(name: str) -> None:
    found = {imported.partition(".")[0] for imported in imports(ROOT / name, at_run_time=True)}
    assert not found & IO_MODULES


@pytest.mark.parametrize("name", SANS_IO)
def test_pure_modules_import_no_shell(name: str) -> None:
    """What a pure module imports of tandem at run time must not reach torch, zmq, asyncio or redis either."""
    seen: set[Path] = set()
    waiting = [ROOT / name]
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        found = list(imports(path, at_run_time=True))
        heavy = {imported.partition(".")[0] for imported in found} & {"torch", "zmq", "asyncio", "redis"}
        assert not heavy, f"{name} reaches {sorted(heavy)} through {path.relative_to(ROOT)}"
        waiting += [target for imported in found if (target := _file_of(imported)) is not None]


def _file_of(imported: str) -> Path | None:
    """The source file of `tandem.a.b.name`, where name may be a module or something in one."""
    if not imported.startswith("tandem."):
        return None
    parts = imported.split(".")[1:]
    for end in (len(parts), len(parts) - 1):
        path = ROOT.joinpath(*parts[:end]).with_suffix(".py")
        if path.is_file():
            return path
    return None
