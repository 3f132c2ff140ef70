"""Tool calls are found in the documented form of each model family, and malformed calls are left as text."""

from __future__ import annotations

import json

import pytest

from braidrl.agents.tool_calls import FORMATS, ToolCall, format_of, parse_tool_calls
from braidrl.agents.turns import TurnTemplate
from braidrl.data.templates import PromptTemplate
from tests.agents.chat import STYLES, make_chat_tokenizer

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "near": {"type": "array"}},
        },
    },
}
PARIS = ToolCall("get_weather", {"city": "Paris", "days": 2})
ROME = ToolCall("get_weather", {"city": "10115", "near": ["a", "b"]})
ONE, TWO = json.dumps(PARIS.arguments), json.dumps(ROME.arguments)
FORMS = {
    "hermes": [
        f'I look.\n<tool_call>\n{{"name": "get_weather", "arguments": {ONE}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "get_weather", "arguments": {TWO}}}\n</tool_call>'
    ],
    "qwen_xml": [
        "I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=get_weather>\n<parameter=city>\n10115\n</parameter>\n"
        '<parameter=near>\n["a", "b"]\n</parameter>\n</function>\n</tool_call>'
    ],
    "glm": [
        "I look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>\n<tool_call>get_weather\n<arg_key>city</arg_key>\n"
        "<arg_value>10115</arg_value>\n"
        '<arg_key>near</arg_key>\n<arg_value>["a", "b"]</arg_value>\n</tool_call>'
    ],
    "llama": [
        f'<|python_tag|>{{"name": "get_weather", "parameters": {ONE}}}; {{"name": "get_weather", "parameters": '
        f"{TWO}}}<|eom_id|>",
        f'{{"name": "get_weather", "parameters": {ONE}}}\n{{"name": "get_weather", "parameters": {TWO}}}',
        f"<function=get_weather>{ONE}</function><function=get_weather>{TWO}</function>",
        "[get_weather(city='Paris', days=2), get_weather(city='10115', near=['a', 'b'])]",
        "<|python_start|>[get_weather(city='Paris', days=2), get_weather(city='10115', near=['a', 'b'])]<|python_end|>",
    ],
    "mistral": [
        f'I look.[TOOL_CALLS] [{{"name": "get_weather", "arguments": {ONE}, "id": "call00000"}}, '
        f'{{"name": "get_weather", "arguments": {TWO}, "id": "call00001"}}]</s>',
        f"I look.[TOOL_CALLS]get_weather[ARGS]{ONE}[TOOL_CALLS]get_weather[ARGS]{TWO}</s>",
        f"I look.[TOOL_CALLS]get_weather[CALL_ID]call00000[ARGS]{ONE}[TOOL_CALLS]get_weather[CALL_ID]"
        f"call00001[ARGS]{TWO}",
        f"I look.[TOOL_CALLS]get_weather{ONE}[TOOL_CALLS]get_weather{TWO}",
    ],
    "deepseek": [
        f"I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        f"{ONE}\n```<｜tool▁call▁end｜>\n"
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{TWO}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        f"I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{ONE}<｜tool▁call▁end｜>"
        f"<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{TWO}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ],
}


def test_optional_texts_stay_texts_and_tools_without_parameters_are_called() -> None:
    optional = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    schema = {
        "type": "object",
        "properties": {"zip": optional, "state": {"type": ["string", "null"]}, "unit": optional},
    }
    tools = [
        {"type": "function", "function": {"name": name, "parameters": p}} for name, p in (("a", schema), ("b", None))
    ]
    values = {"zip": "10115", "state": "7", "unit": "null"}
    said = "".join(f"<parameter={key}>{value}</parameter>" for key, value in values.items())
    text = f"<function=a>{said}</function><function=b><parameter=n>2</parameter></function>"
    found = FORMATS["qwen_xml"].rewritten(text, tools)
    assert found is not None
    first, second = parse_tool_calls(found[1])
    assert first.arguments == {"zip": "10115", "state": "7", "unit": None} and second.arguments == {"n": 2}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in FORMS.items() for text in texts])
def test_two_calls_are_read_in_each_form_with_what_stands_before_them(name: str, text: str) -> None:
    found = FORMATS[name].rewritten(text, [WEATHER])
    assert found is not None
    assert found[0].strip() == ("I look." if text.startswith("I look.") else "")
    assert parse_tool_calls(found[1]) == [PARIS, ROME]


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in FORMS.items() for text in texts])
def test_a_truncated_call_is_ignored_or_reports_its_fault(name: str, text: str) -> None:
    for end in range(len(text)):
        found = FORMATS[name].rewritten(text[:end], [WEATHER])
        for call in parse_tool_calls(found[1]) if found else []:
            assert call.fault is not None or call in (PARIS, ROME)
    assert FORMATS[name].rewritten("It is 12 degrees [in Paris] {today}.", [WEATHER]) is None


def test_the_chat_template_says_which_format_a_model_writes() -> None:
    templates = {
        "hermes": STYLES["chatml"][0],
        "llama": STYLES["headers"][0],
        "mistral": "[AVAILABLE_TOOLS] [TOOL_CALLS]",
        "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        "glm": "<tool_call>{name}<arg_key>k</arg_key>",
        "qwen_xml": "<tool_call><function=a><parameter=b>",
    }
    assert {name: format_of(template) is FORMATS[name] for name, template in templates.items()} == dict.fromkeys(
        templates, True
    )
    assert format_of(None) is FORMATS["hermes"]


def test_calls_marked_by_special_tokens_reach_environments_in_hermes_format() -> None:
    tokenizer = make_chat_tokenizer("chatml")
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]", "[ARGS]"]})
    ids = tokenizer(f"so [TOOL_CALLS]get_weather[ARGS]{ONE}<|im_end|>")["input_ids"]
    turns = TurnTemplate(PromptTemplate(tokenizer), "mistral")
    assert parse_tool_calls(turns.text(ids, [WEATHER])) == [PARIS]
    assert turns.text(ids).startswith("so get_weather"), "without tools a turn is plain text"
    template = {"start_anchor": "<|im_start|>assistant\n", "fields": {"content": {}, "tool_calls": TOOL_CALLS}}
    tokenizer.response_template = template
    assert parse_tool_calls(TurnTemplate(PromptTemplate(tokenizer)).text(ids, [WEATHER])) == [PARIS]


TOOL_CALLS = {
    "open_pattern": r"\[TOOL_CALLS\](?P<name>\w+)\[ARGS\]",
    "close_pattern": r"(?=\[TOOL_CALLS\])|$",
    "repeats": True,
    "content": "json",
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
}
"""Return a schema in the form that transformers documents."""
