"""Dependency arrows between the folders, circles, sizes and purity, read off the source."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest
from wings import WINGS

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = {
    "kernels": set(),
    "engine": {"kernels"},
    "kv_connector": {"engine", "kernels"},
    "node": {"engine", "kv_connector", "kernels"},
    "prefill_node": {"engine", "kv_connector", "kernels", "node"},
    "decode_node": {"engine", "kv_connector", "kernels", "node"},
    "router": {"engine", "kv_connector"},
    "deploy": set(WINGS) - {"llm"},
    "llm": {"deploy", "engine"},
}
# What a router may import of others: contracts and the directory, nothing that loads a model.
ROUTER_MAY = ("engine.contracts", "engine.structured.grammars", "engine.process", "kv_connector.directory")
# A folder within a wing that imports these folders of its wing alone (and, of other wings, what its wing may).
WITHIN = {
    "engine/structured": {"engine/contracts", "engine/process", "engine/scheduling"},
    "engine/process": {"engine/contracts"},
    "engine/contracts": set(),
    "engine/blocks": {"engine/contracts"},
    "engine/scheduling": {"engine/contracts", "engine/blocks", "engine/process"},
    "kv_connector/directory": set(),
    "kv_connector/protocol": set(),
    "kv_connector/source": {"kv_connector/protocol", "kv_connector/layouts"},
    "kv_connector/sink": {"kv_connector/protocol"},
    "router/placing": set(),
    "router/access": set(),
    "router/text": {"router/access"},
    "router/structured": {"router/text"},
    "router/media": {"router/text"},
    "router/chat": {"router/text", "router/structured", "router/media"},
    "router/pooling": {"router/text", "router/requests"},
    "router/audio": {"router/text", "router/requests"},
    "router/responses": {"router/text", "router/chat", "router/requests", "router/media"},
}
# They take events and the time and return decisions: no tensors, sockets, threads or clocks. README.md of each wing.
PURE_FOLDERS = (
    "engine/blocks",
    "engine/scheduling",
    "kv_connector/protocol",
    "kv_connector/source",
    "kv_connector/sink",
    "kv_connector/pulls",
)
PURE_MODULES = (
    "decode_node/ticket_loads.py",
    "deploy/bench/simulated/cluster.py",
    "deploy/bench/simulated/node.py",
    "deploy/bench/trace.py",
    "deploy/bench/trace_report.py",
    "deploy/launch/supervisor.py",
    "engine/contracts/wire/adapter_table.py",
    "engine/contracts/config.py",
    "engine/contracts/directory.py",
    "engine/contracts/errors.py",
    "engine/contracts/hashing.py",
    "engine/contracts/kv_layout.py",
    "engine/pooling/config.py",
    "engine/contracts/rate.py",
    "engine/contracts/sampling_params.py",
    "engine/contracts/tenants.py",
    "engine/contracts/wire/adapters.py",
    "engine/contracts/wire/codec.py",
    "engine/contracts/wire/connection.py",
    "engine/contracts/wire/decoder.py",
    "engine/contracts/wire/handoff.py",
    "engine/contracts/wire/parts.py",
    "engine/contracts/wire/requests.py",
    "engine/parallel/sharding.py",
    "engine/running/step_pieces.py",
    "kernels/prefixes/prefix_groups.py",
    "kernels/products/matmul_plans.py",
    "kernels/products/tuning/candidates.py",
    "kernels/products/tuning/table_file.py",
    "kernels/products/tuning/tuner.py",
    "kv_connector/directory/discovery.py",
    "kv_connector/directory/holders.py",
    "kv_connector/directory/mirror.py",
    "kv_connector/directory/own_view.py",
    "kv_connector/directory/records.py",
    "kv_connector/layouts/layer_groups.py",
    "kv_connector/layouts/plan.py",
    "kv_connector/tiers/index.py",
    "kv_connector/tiers/jobs.py",
    "kv_connector/tiers/manager.py",
    "kv_connector/tiers/promoter.py",
    "kv_connector/tiers/promotions.py",
    "kv_connector/tiers/worth_loading.py",
    "kv_connector/tiers/write_back.py",
    "kv_connector/transfer/waiting_jobs.py",
    "kv_connector/transports/links/landing_wire.py",
    "node/control/events.py",
    "node/departures.py",
    "node/handoffs.py",
    "node/pooling/logic.py",
    "node/requests.py",
    "node/serving.py",
    "router/chat/call_parser.py",
    "router/chat/chat_body.py",
    "router/chat/conversation.py",
    "router/chat/deepseek.py",
    "router/chat/deltas.py",
    "router/chat/harmony.py",
    "router/chat/hermes.py",
    "router/chat/incoming.py",
    "router/chat/llama.py",
    "router/chat/mistral.py",
    "router/chat/parsers.py",
    "router/chat/template.py",
    "router/chat/thinking.py",
    "router/nodes/orphans.py",
    "router/nodes/outbox.py",
    "router/placing/elastic.py",
    "router/placing/outlook.py",
    "router/placing/placement.py",
    "router/placing/policies.py",
    "router/placing/rebalancing.py",
    "router/placing/view.py",
    "router/pooling/body.py",
    "router/requests/actions.py",
    "router/requests/attempts.py",
    "router/requests/machine.py",
    "router/requests/moves.py",
    "router/requests/parts.py",
    "router/requests/submits.py",
    "router/structured/answer.py",
    "router/structured/calls.py",
    "router/responses/body.py",
    "router/responses/input_items.py",
    "router/responses/output_items.py",
)
IO_MODULES = {"torch", "zmq", "asyncio", "redis", "socket", "threading", "subprocess", "uvloop", "time"}
MAX_MODULES = 15  # in a folder


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@cache
def imports(path: Path, at_run_time: bool = False) -> tuple[str, ...]:
    """Full names of imported modules, those inside functions included; `at_run_time` leaves out type-only ones."""
    return tuple(_imports(path, at_run_time))


def _imports(path: Path, at_run_time: bool) -> Iterator[str]:
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


def file_of(imported: str) -> Path | None:
    """The source file of `tandem.a.b.name`, where name may be a module or something in one."""
    if not imported.startswith("tandem."):
        return None
    parts = imported.split(".")[1:]
    for end in (len(parts), len(parts) - 1):
        path = ROOT.joinpath(*parts[:end]).with_suffix(".py")
        if path.is_file():
            return path
    return None


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def circles(graph: Mapping[str, Iterable[str]]) -> set[frozenset[str]]:
    """Strongly connected parts of more than one member."""
    reached = {start: _reachable(graph, start) for start in graph}
    found = {frozenset(other for other in reached[start] if start in reached.get(other, ())) for start in graph}
    return {circle for circle in found if len(circle) > 1}


def _reachable(graph: Mapping[str, Iterable[str]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        new = set(graph.get(waiting.pop(), ())) - seen
        seen |= new
        waiting += new
    return seen


def folder_of(path: Path) -> str:
    return path.parent.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("folder", WINGS)
def test_imports_follow_the_arrows(folder: str) -> None:
    files = sources(folder)
    assert files
    for path in files:
        for name in tandem_imports(path):
            target = name.partition(".")[0]
            assert target == folder or target in ALLOWED[folder], f"{path.relative_to(ROOT)} imports tandem.{name}"


def test_wings_are_imported_under_tandem() -> None:
    """`import kernels` works from the root of the repository and nowhere else."""
    for folder in WINGS:
        for path in sources(folder):
            bare = [name for name in imports(path) if name.partition(".")[0] in WINGS]
            assert not bare, f"{path.relative_to(ROOT)}: import tandem.{bare[0]}"


def test_arrows_have_no_cycle() -> None:
    assert not circles({folder: ALLOWED[folder] - {folder} for folder in WINGS if folder != "deploy"})


def test_circles_are_found() -> None:
    graph = {"a": ["b"], "b": ["c"], "c": ["b"], "d": ["a"]}
    assert circles(graph) == {frozenset({"b", "c"})}


def test_modules_import_each_other_in_no_circle() -> None:
    """Type-only imports and those within functions count: a reader follows them, too."""
    graph = {}
    for folder in WINGS:
        for path in sources(folder):
            targets = (file_of(name) for name in imports(path))
            graph[name_of(path)] = {name_of(target) for target in targets if target not in (None, path)}
    assert not circles(graph)


@pytest.mark.parametrize("wing", ["engine", "kv_connector", "router"])
def test_folders_of_a_wing_import_each_other_in_no_circle(wing: str) -> None:
    """At run time. A folder and one inside it may: what is inside implements what the outer one offers."""
    graph: dict[str, set[str]] = {}
    for path in sources(wing):
        own = folder_of(path)
        for name in imports(path, at_run_time=True):
            target = file_of(name)
            other = own if target is None else folder_of(target)
            if other.split("/")[:2] != own.split("/")[:2] and other.startswith(wing):
                graph.setdefault("/".join(own.split("/")[:2]), set()).add("/".join(other.split("/")[:2]))
    assert graph
    assert not circles(graph)


@pytest.mark.parametrize("folder", WITHIN)
def test_folders_import_what_they_may_of_their_wing(folder: str) -> None:
    wing = folder.partition("/")[0]
    for path in sources(folder):
        for name in tandem_imports(path):
            target = "/".join(name.split(".")[:2])
            allowed = not name.startswith(f"{wing}.") or target == folder or target in WITHIN[folder]
            assert allowed, f"{path.relative_to(ROOT)} imports tandem.{name}"


def test_a_folder_has_few_modules() -> None:
    for top in WINGS:
        for folder in {path.parent for path in sources(top)}:
            modules = [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]
            assert len(modules) <= MAX_MODULES, f"{folder.relative_to(ROOT)} has {len(modules)} modules: divide it"


def test_the_router_imports_contracts_and_the_directory_only() -> None:
    for path in sources("router"):
        for name in tandem_imports(path):
            assert name.startswith(("router.", *ROUTER_MAY)), f"{path.relative_to(ROOT)} imports tandem.{name}"


def pure_modules() -> list[str]:
    inside = [path.relative_to(ROOT).as_posix() for folder in PURE_FOLDERS for path in sources(folder)]
    return [*inside, *PURE_MODULES]


@pytest.mark.parametrize("name", pure_modules())
def test_pure_modules_do_no_io(name: str) -> None:
    found = {imported.partition(".")[0] for imported in imports(ROOT / name, at_run_time=True)}
    assert not found & IO_MODULES


@pytest.mark.parametrize("name", pure_modules())
def test_pure_modules_import_no_shell(name: str) -> None:
    """What a pure module imports of tandem at run time must not reach torch, zmq, asyncio or redis either."""
    seen: set[Path] = set()
    waiting = [ROOT / name]
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        found = imports(path, at_run_time=True)
        heavy = {imported.partition(".")[0] for imported in found} & {"torch", "zmq", "asyncio", "redis"}
        assert not heavy, f"{name} reaches {sorted(heavy)} through {path.relative_to(ROOT)}"
        waiting += [target for imported in found if (target := file_of(imported)) is not None]
