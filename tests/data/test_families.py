"""Chat templates of model families, with their own end tokens and roles, and the forms of messages that data have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from braidrl.config import DataConfig, SourceConfig
from braidrl.data.prompts import LoadedSource, load_source
from braidrl.data.sources import Reading
from braidrl.data.templates import PromptTemplate
from braidrl.errors import UserError
from tests.data.shared_cases import byte_tokenizer
from tests.data.test_data_kept_whole import CHATML, TOOL_CHAT, Write, answer, load, trained, user

MARKS = ("<|channel|>", "<|message|>", "<|return|>", "<|call|>")
# As gpt-oss's: a last answer, an earlier one and a call end with tokens of their own.
HARMONY = """
{%- for m in messages %}{% if m.role == 'assistant' and m.tool_calls -%}
<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>
{{- m.tool_calls[0].function.arguments | tojson }}<|call|>
{%- elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}
{{- '<|return|>' if loop.last else '<|end|>' }}
{%- elif m.role == 'tool' %}<|start|>functions.add to=assistant<|message|>{{ m.content | tojson }}<|end|>
{%- elif m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
# As DeepSeek R1's: of several system messages the last one is written.
LAST_SYSTEM = (
    "{% set ns = namespace(s='') %}{% for m in messages if m.role == 'system' %}{% set ns.s = m.content %}"
    "{% endfor %}{{ ns.s }}"
    + CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")
)
# As Qwen 3's: a role that it does not know is not written.
KNOWN_ROLES = CHATML.replace(
    "{% for m in messages %}", "{% for m in messages if m.role in ('system', 'user', 'assistant', 'tool') %}"
)
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
TOLD = {"role": "tool", "content": 'the "sum"'}


def load_harmony(path: Path) -> LoadedSource:
    tokenizer = byte_tokenizer(HARMONY, "<eos>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    return load_source(Reading(SourceConfig(path=path), responses=True), DataConfig(), PromptTemplate(tokenizer))


def said(source: LoadedSource) -> list[str]:
    """Return the trained parts of the first row, by a tokenizer that knows the family's tokens."""
    tokenizer = byte_tokenizer(HARMONY, "<eos>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    ids, mask = source.response(0) or pytest.fail("there is no response")
    parts: list[list[int]] = [[]]
    for token, is_trained in zip(ids.tolist(), mask.tolist(), strict=True):
        if is_trained:
            parts[-1].append(token)
        elif parts[-1]:
            parts.append([])
    return [tokenizer.decode(part) for part in parts if part]


def test_each_turn_of_gpt_oss_form_ends_with_its_own_token(write_jsonl: Write) -> None:
    path = write_jsonl([{"messages": [user(), answer("", tool_calls=[CALL]), TOLD, answer("a"), user(), answer("b")]}])
    source = load_harmony(path)
    assert said(source) == [
        ' to=functions.add<|channel|>commentary json<|message|>{"a": 2}<|call|>',
        "<|channel|>final<|message|>a<|end|>",
        "<|channel|>final<|message|>b<|return|>",
    ]
    assert source.omissions() == []


DEVELOPER = {"role": "developer", "content": "Be kind."}
SYSTEMS = [{"role": "system", "content": f"Be {how}."} for how in ("kind", "brief")]


@pytest.mark.parametrize(
    ("template", "messages", "role"),
    [
        (KNOWN_ROLES, [DEVELOPER, user(), answer("b")], "developer"),
        (KNOWN_ROLES, [user(), answer("a"), DEVELOPER, user(), answer("b")], "developer"),
        (LAST_SYSTEM, [*SYSTEMS, user(), answer("b")], "system"),
    ],
)
def test_a_message_that_the_template_does_not_write_gets_a_line(
    template: str, messages: list[Any], role: str, write_jsonl: Write
) -> None:
    whole = {"messages": [user(), answer("a")]}
    notes = load(write_jsonl([whole, {"messages": messages}]), template).omissions()
    assert any(f"not write the content of a message of the role {role!r}; line 2" in note for note in notes), notes
    assert not any("content" in note for note in load(write_jsonl([whole]), template).omissions())


def test_what_tools_say_may_be_written_as_json(write_jsonl: Write) -> None:
    template = TOOL_CHAT.replace("{{ m.content }}", "{{ m.content | tojson if m.role == 'tool' else m.content }}")
    path = write_jsonl([{"messages": [user(), answer("", tool_calls=[CALL]), TOLD, answer("b")]}])
    assert load(path, template).omissions() == []


def test_text_beside_a_call_that_the_template_leaves_out_is_refused(write_jsonl: Write) -> None:
    template = TOOL_CHAT.replace("{{ m.content }}", "{{ '' if m.tool_calls else m.content }}")
    path = write_jsonl([{"messages": [user(), answer("I look.", tool_calls=[CALL]), TOLD, answer("b")]}])
    for train_on in ("all", "last"):
        if train_on == "all":
            with pytest.raises(UserError, match=r"line 1: .*without the message's 'content'"):
                load(path, template)
        else:
            notes = load(path, template, train_on=train_on).omissions()
            assert any("content of a message of the role 'assistant'" in note for note in notes)


@pytest.mark.parametrize(
    "calls",
    [
        json.dumps([{**CALL, "function": {"name": "add", "arguments": '{"a": 2}'}}]),
        CALL,
        json.dumps(CALL),
        [{"name": "add", "parameters": {"a": 2}}],
    ],
)
def test_calls_may_be_one_object_or_text(calls: Any, write_jsonl: Write) -> None:
    template = TOOL_CHAT.replace("c.function.name", "(c.function or c).name").replace(
        "c.function.arguments", "(c.function or c).arguments"
    )
    path = write_jsonl([{"messages": [user(), answer(None, tool_calls=calls), TOLD, answer("b")]}])
    assert trained(load(path, template))[1] == '<call>add {"a": 2}<|im_end|>|b<|im_end|>'


def test_openais_former_role_of_a_function_is_a_tools(write_jsonl: Write) -> None:
    call = answer(None, function_call={"name": "add", "arguments": '{"a": 2}'})
    path = write_jsonl([{"messages": [user(), call, {"role": "function", "name": "add", "content": "5"}, answer("b")]}])
    assert "<|im_start|>tool\n5<|im_end|>" in trained(load(path, TOOL_CHAT))[0]


def test_an_answer_before_the_first_question_is_named(write_jsonl: Write) -> None:
    notes = load(write_jsonl([{"messages": [answer("hi"), user(), answer("b")]}]), CHATML).omissions()
    assert len(notes) == 1 and "an answer at the start of a conversation belongs to the prompt; line 1" in notes[0]


def test_an_earlier_answer_without_an_end_token_is_named(write_jsonl: Write) -> None:
    roles = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}{% endfor %}"  # as GLM's
    roles += "{{ '<|start|>assistant\n' if add_generation_prompt }}"
    path = write_jsonl([{"messages": [user(), answer("a"), user(), answer("b")]}])
    assert any("without a special token" in note for note in load(path, roles).omissions())
    assert load(path, roles, train_on="last").omissions() == load(path, CHATML).omissions() == []


def test_unwanted_responses_of_labelled_data_are_named(write_jsonl: Write) -> None:
    records = [{"prompt": "q", "completion": "a", "label": label} for label in (True, False)]
    notes = load(write_jsonl(records), CHATML).omissions()
    assert any("'label' is false" in note and "line 2" in note for note in notes)
    assert len(load(write_jsonl(records), CHATML, where={"label": True})) == 1


@pytest.mark.parametrize("form", ["sharegpt", "openai"])
def test_a_pair_of_answers_beside_its_conversation_is_read(form: str, write_jsonl: Write) -> None:
    record: dict[str, Any] = {
        "conversations": [{"from": "human", "value": "q"}],
        "chosen": {"from": "gpt", "value": "yes"},
        "rejected": {"from": "gpt", "value": "no"},
    }
    if form == "openai":
        record = {"messages": [user()], "chosen": [answer("yes")], "rejected": [answer("no")]}
    source = load(write_jsonl([record]), CHATML, pairs=True)
    assert trained(source)[1] == "yes<|im_end|>" and trained(source, which="rejected")[1] == "no<|im_end|>"
    assert "user\nq<|im_end|>" in trained(source)[0]


@pytest.mark.parametrize(
    "thought",
    [{"type": "thinking", "thinking": "hm"}, {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}],
)
def test_a_part_with_reasoning_is_the_messages_reasoning(thought: Any, write_jsonl: Write) -> None:
    template = CHATML.replace("{{ m.content }}", "{{ '[' ~ m.thinking ~ ']' if m.thinking }}{{ m.content }}")
    said = {"role": "assistant", "content": [thought, {"type": "output_text", "text": "b"}]}
    path = write_jsonl([{"messages": [user(), said]}])
    assert trained(load(path, template))[1] == "[hm]b<|im_end|>"
    with pytest.raises(UserError, match="'reasoning_content'"):
        load(path, CHATML)


def test_a_turn_without_an_end_token_keeps_the_white_space_of_its_content(write_jsonl: Write) -> None:
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    plain += "{{ 'assistant: ' if add_generation_prompt }}"
    path = write_jsonl([{"messages": [user(), answer(" a \n"), user(), answer("b")]}])
    assert trained(load(path, plain))[1].startswith(" a \n|b")
