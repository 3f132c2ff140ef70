"""Tool calls are found in the documented form of each model family, and malformed calls are left as text."""

from __future__ import annotations

import json
from dataclasses import replace

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
    "harmony": [
        f"I look.<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json"
        f"<|message|>{ONE}<|call|>"
        f"<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{TWO}<|call|>",
        f"<|channel|>commentary to=functions.get_weather<|message|>{ONE}<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.get_weather<|message|>{TWO}",
    ],
    "kimi": [
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{ONE}<|tool_call_end|><|tool_call_begin|>functions.get_weather:1<|tool_call_argument_begin|>{TWO}"
        "<|tool_call_end|><|tool_calls_section_end|>",
    ],
    "listed": [
        f'I look.<|tool_call|>[{{"name": "get_weather", "arguments": {ONE}}}, '
        f'{{"name": "get_weather", "arguments": {TWO}}}]<|/tool_call|>',
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
    rewritten = FORMATS["qwen_xml"].rewritten(text, tools)
    assert rewritten is not None
    first, second = parse_tool_calls(rewritten[1])
    assert first.arguments == {"zip": "10115", "state": "7", "unit": None} and second.arguments == {"n": 2}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in FORMS.items() for text in texts])
def test_two_calls_are_read_in_each_form_with_what_stands_before_them(name: str, text: str) -> None:
    rewritten = FORMATS[name].rewritten(text, [WEATHER])
    assert rewritten is not None
    assert rewritten[0].strip() == ("I look." if text.startswith("I look.") else "")
    assert parse_tool_calls(rewritten[1]) == [PARIS, ROME]


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in FORMS.items() for text in texts])
def test_a_truncated_call_is_ignored_or_reports_its_fault(name: str, text: str) -> None:
    for end in range(len(text)):
        rewritten = FORMATS[name].rewritten(text[:end], [WEATHER])
        for call in parse_tool_calls(rewritten[1]) if rewritten else []:
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
        "harmony": "<|start|>assistant<|channel|>commentary to=functions.",
        "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>",
        "listed": "<|tool_call|>",
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


MARKED = {"city": "</tool_call>", "days": 1}
HERMES_FORMS = [
    f'<tool_call>\n{{"name": "get_weather", "arguments": {json.dumps(MARKED)}}}\n</tool_call>',
    f'<tool_call>{{"name": "get_weather", "parameters": {json.dumps(MARKED)}}}\n',
    f'<tool_call>{{"function": {{"name": "get_weather", "arguments": {json.dumps(json.dumps(MARKED))}}}}}</tool_call>.',
]


@pytest.mark.parametrize("text", HERMES_FORMS)
def test_an_end_mark_inside_a_string_and_other_names_of_arguments_are_read(text: str) -> None:
    assert parse_tool_calls(f"so {text}") == [ToolCall("get_weather", MARKED)]
    two = parse_tool_calls(f"{text}<tool_call>{{}}</tool_call>")
    assert two[0] == ToolCall("get_weather", MARKED) and [call.fault is None for call in two] == [True, False]


@pytest.mark.parametrize(
    ("name", "mark", "text"),
    [
        ("mistral", "[TOOL_CALLS]", "[TOOL_CALLS]get_weather[ARGS]{}</s>"),
        ("mistral", "</s>", "[TOOL_CALLS]get_weather[CALL_ID]call00000[ARGS]{}"),
        ("deepseek", "<｜tool▁call▁end｜>", "<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{}<｜tool▁call▁end｜>"),
    ],
)
def test_an_end_mark_inside_a_string_is_read_in_other_formats(name: str, mark: str, text: str) -> None:
    rewritten = FORMATS[name].rewritten(text.replace("{}", json.dumps({"city": mark}, ensure_ascii=False)), [WEATHER])
    assert rewritten is not None and parse_tool_calls(rewritten[1]) == [ToolCall("get_weather", {"city": mark})]


@pytest.mark.parametrize("depth", [65, 960, 100_000])
@pytest.mark.parametrize(("name", "text"), [(name, texts[-1]) for name, texts in FORMS.items() if name != "hermes"])
def test_a_deeply_nested_call_fails_alone(name: str, text: str, depth: int) -> None:
    deep = "[" * depth + "]" * depth
    for nested in (
        text.replace(ONE, f'{{"city": {deep}}}'),
        text.replace("Paris", deep),
        text.replace("'Paris'", deep),
    ):
        rewritten = FORMATS[name].rewritten(nested, [WEATHER])
        calls = parse_tool_calls(rewritten[1]) if rewritten else []
        assert all(call.fault is not None or isinstance(call.arguments, dict) for call in calls)
    hermes = parse_tool_calls(f'<tool_call>{{"name": "a", "arguments": {{"x": {deep}}}}}</tool_call>')
    assert hermes[0].fault is not None


def test_environments_see_special_tokens_as_verifiers_do_and_clients_none() -> None:
    tokenizer = make_chat_tokenizer("chatml")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<box>"]})
    template = TurnTemplate(PromptTemplate(tokenizer))
    seen = replace(template, hidden=frozenset([tokenizer.eos_token_id]))
    ids = tokenizer("a<box>4<|im_end|>")["input_ids"]
    assert (seen.text(ids), template.text(ids)) == ("a<box>4", "a4")
    call = '<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>'
    ids = tokenizer(f"<box>{call}<|im_end|>")["input_ids"]
    assert (seen.text(ids, [WEATHER]), template.text(ids, [WEATHER])) == (f"<box>{call}", call)


def test_the_end_of_a_turn_in_llama_2s_form_is_written_once() -> None:
    tokenizer = make_chat_tokenizer("chatml")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]"
        "{% else %} {{ m.content }} <|im_end|>{% endif %}{% endfor %}"
    )
    template = TurnTemplate(PromptTemplate(tokenizer))
    assert tokenizer.decode(template.following("b", tokenizer.eos_token_id).ids) == "<s>[INST] b [/INST]"
    cut = template.following("b", tokenizer("a")["input_ids"][0]).ids
    assert tokenizer.decode(cut) == " <|im_end|><s>[INST] b [/INST]"
