"""What pages tell their readers to type: fenced blocks, the commands in them, and commands within a sentence."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from wings import WINGS

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "deploy" / "demo_model"
_AT_THE_TOP = ("README.md", "CONTRIBUTING.md")
PAGES = sorted([
    *(ROOT / name for name in _AT_THE_TOP),
    *(ROOT / "docs").rglob("*.md"),
    *(path for wing in WINGS for path in (ROOT / wing).rglob("*.md")),
    ROOT / "tests" / "README.md",
])  # fmt: skip

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_OPERATORS = re.compile(r"[|&;<>()]+")


@dataclass(frozen=True)
class Block:
    """A fenced block: `language` as after the fence ("" for none)."""

    page: str  # from the root
    language: str
    text: str

    @property
    def lines(self) -> list[str]:
        """Its commands, each on one line and without a comment."""
        joined = re.sub(r"\s*\\\n\s*", " ", self.text)
        kept = [re.sub(r"(^|\s)#.*$", "", line).strip() for line in joined.splitlines()]
        return [line for line in kept if line]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(language: str, page: str = "") -> list[Block]:
    """Those of a language, of one page or of all."""
    found = [
        Block(name_of(path), kind, text)
        for path in PAGES
        if page in ("", name_of(path))
        for kind, text in _FENCE.findall(path.read_text())
    ]
    return [block for block in found if block.language == language]


def languages() -> set[str]:
    """Of all fenced blocks."""
    return {kind for path in PAGES for kind, _ in _FENCE.findall(path.read_text())}


def inline(page: Path) -> list[str]:
    """What stands between backticks in a page's sentences and tables, in one line each."""
    return [" ".join(text.split()) for text in _INLINE.findall(_FENCE.sub("", page.read_text()))]


def programs(line: str) -> list[list[str]]:
    """The programs that a line of shell calls, each with its arguments; variables set before them are left out."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    calls: list[list[str]] = [[]]
    for word in lexer:
        if _OPERATORS.fullmatch(word):
            calls.append([])
        elif calls[-1] or not re.match(r"[A-Z_]+=", word):
            calls[-1].append(word)
    return [call for call in calls if call]


# Commands that no test runs as they stand, by page and beginning, and what shows instead that they are true. All the
# others run in tests/cluster/test_documented_commands.py.
NOT_RUN = {
    ("README.md", "make"): "it sets up the machine, and CI runs `make test`",
    ("CONTRIBUTING.md", "make"): "targets of the Makefile, which are looked up",
    ("CONTRIBUTING.md", ".venv/bin/pytest"): "a test of tests; its path is looked up",
    ("tests/README.md", "make"): "a target of the Makefile",
    ("tests/README.md", ".venv/bin/pytest"): "tests of tests; their paths are looked up",
    ("docs/quickstart.md", "make"): "it sets up the machine; its options are parsed",
    ("docs/quickstart.md", ".venv/bin/pip"): "it installs",
    ("docs/clients.md", "lm-eval"): "not everybody has it; tests/cluster/test_clients.py runs it where it is",
    ("docs/containers.md", "docker"): "it builds; tests/unit/deploy/test_containers.py holds files and options",
    ("docs/containers.md", "cd deploy/containers"): "it leaves a key; the folder is looked up",
    ("docs/containers.md", "MODEL=/models/Qwen3-8B VARIANT=cuda docker"): "as the other docker commands",
    ("docs/containers.md", "kubectl"): "it needs a Kubernetes; the secret's name is looked up in the chart's test",
    ("docs/containers.md", "helm"): "it needs a Kubernetes; the values that it sets are looked up",
    ("docs/from_vllm.md", "vllm"): "another program",
    ("docs/kernels.md", "python benchmarks"): "it needs a GPU; its options are looked up",
    ("docs/kernels.md", "pytest tests/gpu"): "it needs a GPU; its path is looked up",
    ("docs/kernels.md", "tests/gpu/sanitize.sh"): "it needs a GPU; its path is looked up",
    ("docs/product_tables.md", "tandem kernels --tune"): "it needs a GPU; its options are looked up",
    ("docs/kernels.md", "TOOL=racecheck tests/gpu/sanitize.sh"): "it needs a GPU; its path is looked up",
    ("docs/quantised_weights.md", "tandem serve MODEL-FP8"): "a checkpoint of somebody's; the page names its tests",
    ("docs/speculation.md", 'tandem serve MODEL --speculative-config \'{"method": "draft_model"'): "it needs a draft",
    ("docs/heads.md", "tandem serve MODEL --speculative-config"): "it needs a head",
    ("docs/scaling.md", "tandem serve MODEL --ray"): "tests/cluster/test_ray.py",
    ("docs/scaling.md", "kubectl"): "it needs a Kubernetes",
    ("docs/scaling.md", "tandem scale"): "tests/unit/deploy/scale/test_kubernetes.py, against a stand-in",
    ("docs/several_hosts.md", "pip"): "it installs; the extra is looked up",
    ("docs/several_hosts.md", "tandem serve /models/Qwen3-8B --ray"): "tests/cluster/test_ray.py",
    ("docs/supported.md", "pip"): "it installs; tests/cluster/test_wheel.py does so without a network",
    ("docs/tracing.md", "pip"): "it installs; the extra is looked up",
    ("docs/verification.md", ".venv/bin/python tests/soak"): "hours; tests/cluster/test_soak.py runs short ones",
}  # fmt: skip


# Which test runs the programs of a page, or reads its files of settings.
RUN_BY = {
    ("python", "README.md"): "tests/cluster/test_documented_commands.py",
    ("python", "docs/clients.md"): "tests/cluster/test_clients.py",
    ("python", "docs/from_vllm.md"): "tests/cluster/test_documented_commands.py",
    ("python", "docs/multimodal.md"): "tests/cluster/test_media_http.py",
    ("python", "docs/python.md"): "tests/cluster/test_documented_commands.py",
    ("python", "docs/quickstart.md"): "tests/cluster/test_recipes.py",
    ("python", "docs/recipes.md"): "tests/cluster/test_recipes.py",
    ("yaml", "docs/keys.md"): "tests/unit/router/access/test_api_keys.py",
    ("yaml", "docs/metrics.md"): "tests/unit/deploy/observe/test_observe.py",
    ("yaml", "docs/scaling.md"): "tests/unit/deploy/test_helm_chart.py",
}


def why_not_run(page: str, line: str) -> str:
    """ "" for what the tests run as it stands."""
    fitting = [why for (where, start), why in NOT_RUN.items() if where == page and line.startswith(start)]
    return fitting[0] if fitting else ""
