"""Objects are whole when they are made: nobody sets another object's fields, and nothing that is handed out while an
object is made reads what it does not have yet. Read off the source.

A record (a dataclass or struct that is not frozen) is plain data, and its folder's to change. Of anything else only its
own methods set fields; where `x` of `x.field = …` belongs to is judged by the name of the field.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from wings import WINGS

ROOT = Path(__file__).resolve().parents[2]
# Fields of others that are set all the same: who says that they are set so.
SET_FROM_OUTSIDE = {
    "deploy/train_demo_model.py": ("tokenizers", {"pre_tokenizer", "decoder", "post_processor"}),
    "deploy/launch/launcher.py": ("ssl", {"check_hostname", "verify_mode"}),
    "engine/device/cuda_driver.py": ("ctypes", {"argtypes", "source", "target"}),
    "engine/models/decoder.py": ("torch", {"weight"}),
    "engine/models/hf/adapters.py": (
        "transformers",
        {
            "forward",
            "attn_temperature_tuning",
            "tandem_query_scale",
            "_experts_implementation",
        },
    ),
    "engine/models/hf/attention.py": (
        "contextvars' way, by a thread's local of this module",
        {"calls", "positions", "storing", "attends_not"},
    ),
    "engine/models/hf/config.py": ("transformers", {"pad_token_id"}),
    "engine/models/hf/encoder.py": ("transformers", {"forward", "tandem_cross", "_attn_implementation"}),
    "engine/models/hf/trials/encoder_trial.py": ("transformers", {"_attn_implementation"}),
    "engine/models/hf/loading/loader.py": ("transformers", {"num_hidden_layers"}),
    "engine/models/hf/low_rank.py": ("transformers", {"forward"}),
    "engine/models/hf/norms.py": ("transformers", {"forward"}),
    "engine/models/hf/rotations.py": ("transformers", {"forward", "__kwdefaults__"}),
    "engine/models/hf/parallel.py": (
        "transformers",
        {
            "tandem_cut",
            "tandem_heads",
            "num_key_value_groups",
            "tandem_experts",
            "tandem_group",
            "num_experts",
            "_is_expert_parallel",
        },
    ),
    "engine/models/hf/trials/trial.py": ("transformers", {"_attn_implementation"}),
    "engine/models/layers/mlp.py": ("torch", {"data"}),
    "engine/process/process_log.py": ("logging", {"msg"}),
    "engine/process/watched.py": ("threading", {"excepthook"}),
    "kernels/api/forward_context.py": ("contextvars' way, by a thread's local of this module", {"context"}),
    "kernels/check/compilations.py": ("triton", {"jit_cache_hook"}),
    "kv_connector/tiers/host_blocks.py": ("weakref", {"atexit"}),
    "node/control/sockets.py": ("zmq", {"curve_server", "curve_publickey", "curve_secretkey", "curve_serverkey"}),
    "router/http/http_protocol.py": ("uvicorn", {"keep_alive"}),
    "router/nodes/node_socket.py": ("zmq", {"curve_publickey", "curve_secretkey", "curve_serverkey"}),
    "router/process/worker.py": ("uvicorn", {"should_exit"}),
}


def sources() -> list[Path]:
    return [path for folder in WINGS for path in sorted((ROOT / folder).rglob("*.py"))]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def classes(tree: ast.AST) -> list[ast.ClassDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def is_record(kind: ast.ClassDef) -> bool:
    made_by = [ast.unparse(each) for each in kind.decorator_list if ast.unparse(each).startswith("dataclass")]
    is_struct = any(ast.unparse(base).endswith("Struct") for base in kind.bases)
    frozen = any("frozen=True" in each for each in made_by) or any(each.arg == "frozen" for each in kind.keywords)
    return bool(made_by or is_struct) and not frozen


def fields_of_records(tree: ast.Module) -> set[str]:
    inside = [each for kind in classes(tree) if is_record(kind) for each in kind.body]
    return {each.target.id for each in inside if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)}


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


@cache
def own_fields(node: ast.AST, context: type) -> frozenset[str]:
    """Fields of `self` that are read (ast.Load) or set (ast.Store) there."""
    found = (each for each in ast.walk(node) if isinstance(each, ast.Attribute) and is_self(each.value))
    return frozenset(each.attr for each in found if isinstance(each.ctx, context))


def set_from_outside(tree: ast.Module, records: set[str]) -> Iterator[ast.Attribute]:
    """Assignments to fields of what is neither `self`, nor a record, nor made by the class that the line is in."""
    made_here = {
        node
        for kind in classes(tree)
        for node in fields_set(kind)
        if isinstance(node.value, ast.Name) and node.attr in own_fields(kind, ast.Store)
    }
    for node in fields_set(tree):
        if not (is_self(node.value) or node.attr in records or node in made_here):
            yield node


def fields_set(tree: ast.AST) -> list[ast.Attribute]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]


def too_early(kind: ast.ClassDef) -> Iterator[tuple[int, str, str]]:
    """(line, what, field): what `__init__` hands out or calls, a lambda or a method, and a field that it reads and that
    is set later."""
    methods = {each.name: each for each in kind.body if isinstance(each, ast.FunctionDef)}
    constructor = methods.pop("__init__", None) or methods.pop("__post_init__", None)
    if constructor is None:
        return
    fields = own_fields(constructor, ast.Store)
    reads = {name: own_fields(method, ast.Load) for name, method in methods.items()}
    for _ in methods:  # what they call reads for them
        for name, found in reads.items():
            reads[name] = found.union(*(reads.get(each, ()) for each in found))
    there: set[str] = set()
    for statement in in_order(constructor.body):
        for node in ast.walk(statement):
            if isinstance(node, ast.Lambda):
                found = own_fields(node, ast.Load)
                needed, what = found.union(*(reads.get(each, ()) for each in found)), "a lambda"
            elif isinstance(node, ast.Attribute) and is_self(node.value) and node.attr in reads:
                needed, what = reads[node.attr] - own_fields(methods[node.attr], ast.Store), node.attr
            else:
                continue
            yield from ((node.lineno, what, each) for each in sorted(needed & fields - there))
        there |= own_fields(statement, ast.Store)


def in_order(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements without others in them."""
    for statement in body:
        inner = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
        if any(inner):
            for each in inner:
                yield from in_order(each)
        else:
            yield statement


def test_what_is_set_from_outside_or_read_too_early_is_found() -> None:
    tree = ast.parse(
        "class Late:\n"
        "    def __init__(self, other):\n"
        "        other.hook = self.a = lambda: self.b\n"
        "        self.c = Thread(self._run)\n"
        "        self.b = self.record.count = 1\n"
        "    def _run(self):\n"
        "        self._step()\n"
        "    def _step(self):\n"
        "        return self.a + self.b\n"
        "    @classmethod\n"
        "    def make(cls):\n"
        "        made = cls()\n"
        "        made.b = 2\n"
    )
    assert [ast.unparse(node) for node in set_from_outside(tree, {"count"})] == ["other.hook"]
    assert list(too_early(classes(tree)[0])) == [(3, "a lambda", "b"), (4, "_run", "b")]


def test_nobody_sets_fields_of_others() -> None:
    records: dict[Path, set[str]] = {}
    for path in sources():
        records.setdefault(path.parent, set()).update(fields_of_records(tree_of(path)))
    used = set()
    for path in sources():
        name = path.relative_to(ROOT).as_posix()
        _, allowed = SET_FROM_OUTSIDE.get(name, ("", set()))
        for node in set_from_outside(tree_of(path), records[path.parent]):
            used.add((name, node.attr))
            assert node.attr in allowed, f"{name}:{node.lineno} sets {ast.unparse(node)}, which is another object's"
    assert used == {(name, field) for name, (_, fields) in SET_FROM_OUTSIDE.items() for field in fields}


def test_nothing_is_handed_out_before_it_can_be_used() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} {what} reads self.{field}, which is set later"
        for path in sources()
        for kind in classes(tree_of(path))
        for line, what, field in too_early(kind)
    ]
    assert not found, "\n".join(found)
