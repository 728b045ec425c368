"""`tandem chat` and `tandem complete` against a real router in front of a stand-in node."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from router_in_thread import VOCAB_SIZE, RouterInThread

from stand_in_node import StandInNode, stand_in_output
from tandem.deploy.cli import main
from tandem.router.text.tokenizer import Tokenizer

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture(scope="module")
def router(folder: Path, node: StandInNode) -> Iterator[RouterInThread]:
    with RouterInThread(folder, (node.address,), chat_template=TEMPLATE, api_key="sk") as router:
        yield router.wait_ready()


def prompt_of(node: StandInNode, folder: Path) -> str:
    ids = node.submits[-1].prompt_token_ids
    return Tokenizer(folder).decode([int.from_bytes(ids[i : i + 4], "little") for i in range(0, len(ids), 4)])


def answer_to(prompt: str, folder: Path, num_tokens: int) -> str:
    ids = Tokenizer(folder).encode(prompt, add_special_tokens=False)
    return Tokenizer(folder).decode(stand_in_output(ids, num_tokens, VOCAB_SIZE))


def talk(router: RouterInThread, command: str, *arguments: str) -> int:
    return main([command, *arguments, "--url", f"{router.url}/v1", "--api-key", "sk", "--max-tokens", "4"])


def test_one_message_gets_one_answer(router: RouterInThread, folder: Path, capsys: Any) -> None:
    assert talk(router, "chat", "the fox", "--system-prompt", "the dog") == 0
    prompt = "system: the dog\nuser: the fox\nassistant:"
    assert capsys.readouterr().out == answer_to(prompt, folder, 4) + "\n"


def test_what_standard_input_holds_is_completed(
    router: RouterInThread, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("the lazy dog"))
    assert talk(router, "complete") == 0
    assert capsys.readouterr().out == answer_to("the lazy dog", folder, 4) + "\n"


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_a_reader_that_leaves_is_no_fault(router: RouterInThread, command: str) -> None:
    """`tandem complete ... | head`."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as closed:
        arguments = [command, "the fox", "--url", router.url, "--api-key", "sk", "--max-tokens", "4"]
        started = [sys.executable, "-m", "tandem.deploy.cli", *arguments]
        done = subprocess.run(started, stdout=closed, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_conversation_remembers_until_it_is_told_not_to(
    router: RouterInThread, node: StandInNode, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    prompts: list[str] = []
    lines = iter(["the fox\\", "jumps", "the dog", "/clear", "the cat", "", "/exit"])

    def typed(_: str) -> str:
        prompts.append(prompt_of(node, folder) if node.submits else "")
        return next(lines)

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", typed)
    assert talk(router, "chat") == 0
    first = "user: the fox\njumps\nassistant:"
    answer = answer_to(first, folder, 4)
    assert prompts[2] == first
    assert prompts[3] == f"user: the fox\njumps\nassistant: {answer}\nuser: the dog\nassistant:"
    assert prompts[5] == "user: the cat\nassistant:"
    assert answer in capsys.readouterr().out


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_ctrl_c_ends_an_answer_and_not_the_conversation(
    router: RouterInThread, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("tandem.deploy.talk.Conversation.show", interrupt)
    assert talk(router, "chat", "the fox") == 0
    assert "(stopped)" in capsys.readouterr().out


def interrupt(*_: Any) -> str:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("arguments", "complaint", "code"),
    [
        (["--temperature", "99"], "(field `temperature`)", 1),
        (["--model", "other"], "tandem: HTTP 404: ", 1),
        (["--api-key", "wrong"], "check --url and --api-key", 2),
    ],
)
def test_a_refusal_is_one_line(
    router: RouterInThread, arguments: list[str], complaint: str, code: int, capsys: Any
) -> None:
    assert main(["chat", "hi", "--url", router.url, "--api-key", "sk", *arguments]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert complaint in line


# --- what is in force ---------------------------------------------------------------------------------------------


# README says: "`tandem config` shows what is in force and where it comes from"
def test_config_shows_what_is_in_force_and_where_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("max_num_seqs: 32\nblock_size: 128\n")
    for name, value in {"CONFIG": str(file), "BLOCK_SIZE": "256", "API_KEY": "sk-hunter2"}.items():
        monkeypatch.setenv(f"TANDEM_{name}", value)
    assert main(["config", "--port", "9000"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "port: 9000  # command line" in lines
    assert f"max_num_seqs: 32  # {file}: max_num_seqs" in lines
    assert "block_size: 256  # TANDEM_BLOCK_SIZE" in lines
    assert 'dtype: "auto"  # default' in lines
    assert "# api_key: not shown  # TANDEM_API_KEY" in lines
    assert "hunter2" not in "".join(lines)


@pytest.mark.parametrize("command", ["serve", "decode", "router", "bench", "chat", "complete", "explain", "kernels"])
def test_what_config_shows_is_a_file_for_it(command: str, tmp_path: Path, capsys: Any) -> None:
    assert main(["config", command]) == 0
    shown = capsys.readouterr().out
    file = tmp_path / "shown.yaml"
    file.write_text(shown)
    assert main(["config", command, "--config", str(file)]) == 0
    values = [line.partition("  # ")[0] for line in capsys.readouterr().out.splitlines()]
    assert values == [line.partition("  # ")[0] for line in shown.splitlines()]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_options(shell: str, capsys: Any) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "max-num-seqs" in script
    assert "prefix_aware" in script, "and what they may be"
