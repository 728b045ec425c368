"""Templates: where they come from, what they may do, and what messages they get."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.engine.contracts.errors import ConfigError, InvalidRequestError
from tandem.router.chat.conversation import as_templates_expect, tool_names
from tandem.router.chat.template import ChatTemplate
from tandem.router.chat.template_source import ChatTemplates

HELLO = [{"role": "user", "content": "hello"}]


def template(source: str, **special: str) -> ChatTemplate:
    return ChatTemplate(source, "it", special)


def render(source: str, **variables: object) -> str:
    return template(source).render(HELLO, variables)


def test_what_templates_may_use() -> None:
    assert template("{{ bos_token }}{{ messages[0].content }}", bos_token="<s>").render(HELLO) == "<s>hello"
    assert render("{{ x | tojson }}", x={"a": "<é>"}) == '{"a": "<é>"}'
    assert render("{{ x | tojson(indent=1) }}", x=[1]) == "[\n 1\n]"
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{% generation %}a{% endgeneration %}b") == "ab"
    assert render("  {% if true %}\n  a\n  {% endif %}\n") == "  a\n"  # blocks are trimmed
    assert len(render("{{ strftime_now('%Y') }}")) == 4


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ nobody.content }}", "'nobody' is undefined"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe|undefined"),
        ("{{ range(10 ** 9) | list }}", "too big"),
    ],
)
def test_what_a_template_says_against_messages_is_an_error_of_the_client(source: str, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"chat template refuses this conversation: .*({says})") as raised:
        render(source)
    assert raised.value.param == "messages"


def test_a_last_message_is_left_open() -> None:
    messages = [*HELLO, {"role": "assistant", "content": "I say "}]
    keeps = template("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    assert keeps.render_open(messages) == "[hello][I say "
    trims = template("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}")
    assert trims.render_open(messages) == "[hello][I say"
    with pytest.raises(InvalidRequestError, match="leaves the last message's content out"):
        template("{{ messages[0].content }}").render_open(messages)


# README says: "`--chat-template` brings another"
def test_where_templates_come_from(tmp_path: Path) -> None:
    def chosen(given: str = "", has_tools: bool = False) -> str:
        return ChatTemplates(tmp_path, given).choose(has_tools).render([])

    with pytest.raises(InvalidRequestError, match="no chat template; start the router with --chat-template"):
        chosen()
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "one {{ bos_token }}", "bos_token": {"content": "<s>"}}))
    assert chosen() == "one <s>"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert (chosen(), chosen(has_tools=True)) == ("plain", "tools")
    (tmp_path / "chat_template.jinja").write_text("file")
    assert chosen() == chosen(has_tools=True) == "file"
    (tmp_path / "other.jinja").write_text("other")
    assert chosen(str(tmp_path / "other.jinja")) == "other"
    assert chosen("{{ 1 + 1 }}") == "2"
    for wrong in (str(tmp_path / "missing.jinja"), "{% if %}"):
        with pytest.raises(ConfigError, match=r"chat.template"):
            chosen(wrong)
    (tmp_path / "chat_template.jinja").write_text("{% if %}")  # the model's own: all but chat is served
    with pytest.raises(InvalidRequestError, match=r"no chat template: .*--chat-template"):
        chosen()


def test_messages_as_templates_expect_them() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    slip = {"id": "d", "type": "function", "function": {"name": "f", "arguments": "{'a'"}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call, slip], "reasoning": "hm"},
        {"role": "tool", "tool_call_id": "c", "content": "fine"},
        {"role": "assistant", "content": "ok", "tool_calls": []},
    ]
    made = as_templates_expect(messages, knows_developer=False)
    assert made[0] == {"role": "system", "content": "a\nb"}
    assert made[1].keys() == {"role", "content", "tool_calls", "reasoning", "reasoning_content"}
    assert [call["function"]["arguments"] for call in made[1]["tool_calls"]] == [{"a": 1}, "{'a'"]
    assert made[1]["content"] is None  # calls alone
    assert made[2] == messages[2]
    assert made[3] == {"role": "assistant", "content": "ok"}
    assert as_templates_expect(messages[:1], knows_developer=True)[0]["role"] == "developer"
    assert call["function"]["arguments"] == '{"a": 1}', "the request itself was changed"


def test_templates_take_arguments_as_an_object_or_as_text() -> None:
    call = {"function": {"name": "f", "arguments": '{"a":  "é"}'}}
    [made] = as_templates_expect([{"role": "assistant", "tool_calls": [call]}], knows_developer=True)
    variables = {"call": made["tool_calls"][0]}
    for source, text in [
        ("{{ call.function.arguments | tojson }}", '{"a": "é"}'),
        ("{{ call.function.arguments.a }}", "é"),
        ("{% for name, value in call.function.arguments.items() %}{{ name }}={{ value }}{% endfor %}", "a=é"),
        ("{{ call.type + '<' + call.function.arguments + '>' }}", 'function<{"a":  "é"}>'),
        ("{{ call.function.arguments }}", '{"a":  "é"}'),
        ("{{ call.function | tojson }}", '{"name": "f", "arguments": {"a": "é"}}'),
    ]:
        assert template(source).render(HELLO, variables) == text


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"content": "a"}, r"messages\[0\].role is None"),
        ({"role": "robot", "content": "a"}, r"messages\[0\].role is 'robot'"),
        ({"role": "user", "content": 3}, r"messages\[0\].content must be text"),
        ({"role": "user", "content": [{"type": "image_url"}]}, r"content\[0\] is of the type 'image_url'"),
        ({"role": "user", "content": [{"type": "text"}]}, r"content\[0\]"),
        ({"role": "user", "content": [3]}, r"content\[0\]"),
        ({"role": "assistant", "tool_calls": 3}, r"messages\[0\].tool_calls must be a list"),
        ({"role": "assistant", "tool_calls": [{"function": 3}]}, r"messages\[0\].tool_calls\[0\] must be"),
    ],
)
def test_a_fault_in_a_message_is_named(message: dict, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        as_templates_expect([message], knows_developer=True)


PARAMETERS = {"type": "function", "function": {"name": "f", "parameters": 3}}


@pytest.mark.parametrize("tool", [3, {}, {"type": "custom"}, {"type": "function"}, PARAMETERS])
def test_a_tool_that_is_no_function_is_named(tool: object) -> None:
    with pytest.raises(InvalidRequestError, match=r"tools\[0\]"):
        tool_names([tool])
