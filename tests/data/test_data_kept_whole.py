"""Data are trained as they stand, or a line names what is not: reasoning, tags, weights, roles, tools and arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from braidrl.config import DataConfig, SourceConfig
from braidrl.data.prompts import LoadedSource, load_source
from braidrl.data.sources import Reading
from braidrl.data.templates import PromptTemplate
from braidrl.errors import UserError, causes
from tests.data.conftest import byte_tokenizer

Write = Callable[..., Path]
BODY = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
CALLS = "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
GENERATES = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = "{% for m in messages %}" + BODY + "{% endfor %}" + GENERATES
OPENS = "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
OPENING = {
    # As R1's: the reasoning of given turns is removed, and no turn but the next one has the tag.
    "removes": "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1].lstrip() if m.role == 'assistant' else m.content }}<|im_end|>\n{% endfor %}"
    + OPENS,
    # As Qwen3-Thinking's: the last turn has both tags, also around no reasoning.
    "closes": "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if loop.last and m.role == 'assistant' %}<think>\n"
    "{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}" + OPENS,
}
TOOL_CHAT = (
    "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}" + CALLS + "<|im_end|>\n{% endfor %}" + GENERATES
)
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} <|im_end|>{% endif %}{% endfor %}"
)
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def user(text: str = "q") -> dict[str, str]:
    return {"role": "user", "content": text}


def answer(text: str = "a", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def load(path: Path, chat: str, *, pairs: bool = False, prompts: bool = False, **source: Any) -> LoadedSource:
    tokenizer = byte_tokenizer(chat)
    reading = Reading(SourceConfig(path=path, **source), responses=not (pairs or prompts), pairs=pairs)
    return load_source(reading, DataConfig(max_prompt_tokens=1000), PromptTemplate(tokenizer))


def trained(source: LoadedSource, index: int = 0, which: str = "response") -> tuple[str, str]:
    """Return the whole text of a row, and its trained parts between bars."""
    tokenizer = byte_tokenizer(None)
    response = source.response(index, which)
    assert response is not None
    ids, mask = response
    parts, last = [""], False
    for token, is_trained in zip(ids.tolist(), mask.tolist(), strict=True):
        parts += [""] if is_trained and not last else []
        parts[-1] += tokenizer.decode([token]) if is_trained else ""
        last = is_trained
    whole = [*source.prompt(index).tolist(), *ids.tolist()]
    return tokenizer.decode(whole), "|".join(part for part in parts if part)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_reaches_a_template_that_reads_another_familys_name(name: str, write_jsonl: Write) -> None:
    path = write_jsonl([{"messages": [user(), answer("42", **{name: "six by seven"})]}])
    assert trained(load(path, OPENING["closes"]))[1] == "six by seven\n</think>\n\n42<|im_end|>"
    with pytest.raises(UserError, match=r"line 1: .*template .*'\w+' .* `convert`"):
        load(path, CHATML)


def test_reasoning_of_earlier_turns_that_the_template_drops_is_refused(write_jsonl: Write) -> None:
    path = write_jsonl([{"messages": [user(), answer("1", reasoning="r"), user(), answer("2", reasoning="s")]}])
    with pytest.raises(UserError, match="train_on: last"):
        load(path, OPENING["closes"])
    assert trained(load(path, OPENING["closes"], train_on="last"))[1] == "s\n</think>\n\n2<|im_end|>"


@pytest.mark.parametrize("form", ["messages", "text", "pair"])
def test_an_answer_without_reasoning_is_never_inside_an_open_thought(form: str, write_jsonl: Write) -> None:
    records = {
        "messages": {"messages": [user(), answer("42")]},
        "text": {"prompt": "q", "response": "42"},
        "pair": {"prompt": "q", "chosen": "42", "rejected": "<think>\nhm\n</think>\n41"},
    }
    path = write_jsonl([records[form]])
    pairs = form == "pair"
    start = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    removes, closes = (load(path, OPENING[name], pairs=pairs) for name in ("removes", "closes"))
    assert trained(removes) == (f"{start}42<|im_end|>", "42<|im_end|>")
    assert trained(closes) == (f"{start}<think>\n\n</think>\n\n42<|im_end|>", "\n</think>\n\n42<|im_end|>")
    if pairs:
        for source in (removes, closes):
            assert trained(source, which="rejected")[0] == f"{start}<think>\nhm\n</think>\n41<|im_end|>"


@pytest.mark.parametrize("said", ["<think>\nhm\n</think>\n42", "hm\n</think>\n42", "\n<think>\nhm\n</think>\n42"])
@pytest.mark.parametrize("is_text", [True, False])
def test_a_tag_that_prompt_and_response_both_open_is_written_once(said: str, is_text: bool, write_jsonl: Write) -> None:
    path = write_jsonl([{"prompt": "q", "response": said if is_text else [answer(said)]}])
    whole, _ = trained(load(path, OPENING["removes"]))
    assert whole.endswith("assistant\n<think>\nhm\n</think>\n42<|im_end|>") and whole.count("<think>") == 1


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([{"weight": 0}, {"weight": 1}], "b<|im_end|>"),
        ([{"train": True}, {"train": False}], "a<|im_end|>"),
        ([{"step_loss_mask": 1}, {}], "a<|im_end|>|b<|im_end|>"),
    ],
)
def test_weights_of_messages_decide_which_turns_are_trained(
    weights: list[dict[str, Any]], expected: str, write_jsonl: Write
) -> None:
    first, second = weights
    path = write_jsonl([{"messages": [user(), answer("a", **first), user("w"), answer("b", **second)]}])
    source = load(path, CHATML)
    assert trained(source)[1] == expected
    assert "weight" not in trained(source)[0]


def test_messages_behind_the_last_answer_are_named_with_their_line(write_jsonl: Write) -> None:
    whole = {"messages": [user(), answer("a")]}
    more = {"messages": [user(), answer("a"), user("w")]}
    kept, left = (load(write_jsonl([whole, one]), CHATML).omissions() for one in (whole, more))
    assert kept == [] and len(left) == 1 and "behind the last turn" in left[0] and "line 2" in left[0]


def test_weights_that_leave_nothing_or_are_fractions_are_named(write_jsonl: Write) -> None:
    kept = {"messages": [{**user(), "weight": 1}, answer()]}
    source = load(write_jsonl([kept, {"messages": [user(), answer(weight=0)]}]), CHATML)
    assert len(source) == 1 and "1 records left out" in source.report()
    assert re.search("'weight' of a user's message.*; line 1", source.report())
    with pytest.raises(UserError, match=r"line 1: message 2 .*'loss' .*0\.5"):
        load(write_jsonl([{"messages": [user(), answer(loss=0.5)]}]), CHATML)


@pytest.mark.parametrize("form", ["beside a prompt", "conversations", "rejected"])
def test_a_pair_whose_weights_leave_a_response_untrained_is_left_out(form: str, write_jsonl: Write) -> None:
    chosen, rejected = [answer("x", weight=0)], [answer("y")]
    left: dict[str, Any] = {
        "beside a prompt": {"prompt": [user()], "chosen": chosen, "rejected": rejected},
        "conversations": {"chosen": [user(), *chosen], "rejected": [user(), *rejected]},
        "rejected": {"prompt": "q", "chosen": "x", "rejected": [answer("y", train=False)]},
    }
    kept = {"prompt": "q", "chosen": "x", "rejected": "y"}
    source = load(write_jsonl([kept, left[form]]), CHATML, pairs=True)
    assert len(source) == 1 and "1 records left out because the weights" in source.report()


def test_a_conversation_beside_a_pair_is_its_prompt_and_no_unread_column(write_jsonl: Write) -> None:
    sides = {"chosen": {"from": "gpt", "value": "x"}, "rejected": {"from": "gpt", "value": "y"}}
    path = write_jsonl([{"conversations": [{"from": "human", "value": "q"}], **sides, "id": 3}])
    source = load(path, CHATML, pairs=True)
    assert trained(source)[0].startswith("<|im_start|>user\nq<|im_end|>")
    assert source.report().endswith("not trained on: id")


SHAREGPT = [
    {"from": "human", "value": "2+3?"},
    {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'},
    {"from": "observation", "value": "5"},
    {"from": "gpt", "value": "five"},
]


def test_sharegpts_calls_and_tool_answers_have_their_own_roles(write_jsonl: Write) -> None:
    tools = '[{"type": "function", "function": {"name": "add"}}]'
    path = write_jsonl([{"conversations": SHAREGPT, "tools": tools, "system": "Be kind."}])
    whole, said = trained(load(path, TOOL_CHAT))
    assert said == '<call>add {"a": 2}<|im_end|>|five<|im_end|>'
    assert whole.startswith("add;<|im_start|>system\nBe kind.<|im_end|>") and "<|im_start|>tool\n5<|im_end|>" in whole


@pytest.mark.parametrize(
    ("message", "match"),
    [
        ({"from": "function_call", "value": "add(2)"}, "the call is not JSON"),
        ({"from": "tool_call", "value": '{"arguments": {}}'}, "without a name"),
        ({"from": "observer", "value": "5"}, "from='observer' is an unknown role; Did you mean 'observation'"),
    ],
)
def test_a_role_or_call_that_cannot_be_read_is_named(message: Any, match: str, write_jsonl: Write) -> None:
    path = write_jsonl([{"conversations": [SHAREGPT[0], message, SHAREGPT[3]]}])
    with pytest.raises(UserError, match=rf"line 1: message 2 .*'conversations': .*{match}"):
        load(path, TOOL_CHAT)


def test_a_call_that_the_template_does_not_write_is_refused(write_jsonl: Write) -> None:
    with pytest.raises(UserError, match=r"line 1: .*template .*not write 'tool_calls'"):
        load(
            write_jsonl([{"messages": [user(), answer("", function_call={"name": "add", "arguments": "{}"})]}]), CHATML
        )


@pytest.mark.parametrize("name", ["system", "system_prompt"])
@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "q", "response": "a"},
        {"prompt": [user()], "completion": [answer()]},
        {"messages": [user(), answer()]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    ],
)
def test_a_system_message_beside_the_prompt_is_part_of_it(
    record: dict[str, Any], name: str, write_jsonl: Write
) -> None:
    source = load(write_jsonl([{**record, name: "Be kind."}]), CHATML)
    assert trained(source)[0].startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nq")
    assert "not trained on" not in source.report()


def test_a_system_message_beside_a_conversation_that_has_one_is_named(write_jsonl: Write) -> None:
    source = load(
        write_jsonl([{"messages": [{"role": "system", "content": "s"}, user(), answer()], "system": "t"}]), CHATML
    )
    assert "system\ns<|im_end|>" in trained(source)[0] and "not trained on: system" in source.report()


@pytest.mark.parametrize(
    ("record", "settings", "columns"),
    [
        (
            {"instruction": "q", "input": "1 2", "output": "a"},
            {"prompt_field": "instruction", "response_field": "output"},
            "input",
        ),
        ({"prompt": "q", "response": "a", "history": [["b", "c"]], "weight": 0.5, "id": None}, {}, "history, weight"),
        ({"messages": [user(), answer()], "images": ["a.png"]}, {}, "images"),
    ],
)
def test_columns_that_are_not_trained_on_are_named(
    record: dict[str, Any], settings: dict[str, str], columns: str, write_jsonl: Write
) -> None:
    assert load(write_jsonl([record]), CHATML, **settings).report().endswith(f"not trained on: {columns}")


def test_columns_that_the_model_is_not_shown_are_named_for_prompts_too(write_jsonl: Write) -> None:
    source = load(write_jsonl([{"prompt": "q", "answer": "a", "level": 3}]), CHATML, prompts=True)
    assert source.report().endswith("for verifiers and environments alone: level")


@pytest.mark.parametrize("field", ["prompt", "messages"])
def test_messages_as_json_text_are_read_as_messages(field: str, write_jsonl: Write) -> None:
    record = {"messages": [user(), answer()]} if field == "messages" else {"prompt": [user()], "response": "a"}
    source = load(write_jsonl([{**record, field: json.dumps(record[field])}]), CHATML)
    assert trained(source) == ("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>", "a<|im_end|>")
    assert f"{field!r} is the JSON of messages" in source.report()


def test_other_json_text_is_a_prompt(write_jsonl: Write) -> None:
    for text in ('["a", "b"]', '[{"role": "user"}]', "[1, 2", "[]"):
        assert text in trained(load(write_jsonl([{"prompt": text, "response": "a"}]), CHATML))[0]


def test_roles_that_no_template_knows_are_named(write_jsonl: Write) -> None:
    source = load(write_jsonl([{"prompt": [{"role": "human", "content": "q"}]}]), CHATML, prompts=True)
    assert "role 'human'" in source.report()
    for messages in ([{"role": "User", "content": "q"}, {"role": "Bot", "content": "a"}], ["q", "a"], "q"):
        with pytest.raises(UserError, match=r"'messages' .*(User, Bot|list of messages)"):
            load(write_jsonl([{"messages": messages}]), CHATML)


def test_a_conversation_may_begin_with_an_answer(write_jsonl: Write) -> None:
    source = load(write_jsonl([{"messages": [answer("hi"), user(), answer("a")]}]), CHATML)
    assert trained(source)[1] == "a<|im_end|>"


@pytest.mark.parametrize("form", ["one object", "texts", "text of one object"])
def test_tools_in_other_forms_reach_the_model(form: str, write_jsonl: Write) -> None:
    import json

    tools = {"one object": ADD, "texts": [json.dumps(ADD)], "text of one object": json.dumps(ADD)}[form]
    source = load(write_jsonl([{"prompt": "q", "tools": tools}]), TOOL_CHAT, prompts=True)
    assert source[0].tools == [ADD] and byte_tokenizer(None).decode(source.prompt(0)).startswith("add;")


@pytest.mark.parametrize("tools", ["[{broken", ["add", "{}"], 3])
def test_tools_that_cannot_be_read_get_a_line(tools: Any, write_jsonl: Write) -> None:
    path = write_jsonl([{"prompt": "q"}, {"prompt": "q", "tools": tools}])
    assert "'tools' is " in (said := load(path, TOOL_CHAT, prompts=True).report()) and "line 2 is the first" in said


@pytest.mark.parametrize("name", ["tokenize", "add_generation_prompt", "tools", "return_dict", "chat_template"])
def test_reserved_arguments_of_templates_are_refused_wherever_they_stand(name: str, write_jsonl: Write) -> None:
    path = write_jsonl([{"prompt": "q", "chat_template_kwargs": {name: True}}])
    match = rf"the argument '{name}' .*reserved; "
    with pytest.raises(UserError, match=f"line 1: 'chat_template_kwargs': {match}"):
        load(path, CHATML, prompts=True)
    with pytest.raises(UserError, match=f"`template` of the source .*: {match}"):
        load(path, CHATML, prompts=True, template={name: True})
    with pytest.raises(UserError, match=f"data.template: {match}"):
        PromptTemplate.of(byte_tokenizer(CHATML), DataConfig(template={name: True}))


def test_template_arguments_may_be_json_text_and_unread_ones_get_a_line(write_jsonl: Write) -> None:
    template = "{% if loud %}!{% endif %}" + CHATML
    path = write_jsonl(
        [
            {"prompt": "q", "chat_template_kwargs": '{"loud": true}'},
            {"prompt": "q", "chat_template_kwargs": {"loudd": 1}},
        ]
    )
    source = load(path, template, prompts=True)
    assert byte_tokenizer(None).decode(source.prompt(0)).startswith("!")
    assert "argument 'loudd'; line 2" in source.report()
    with pytest.raises(UserError, match=r"line 1: 'chat_template_kwargs': .*write an object"):
        load(write_jsonl([{"prompt": "q", "chat_template_kwargs": "loud"}]), template, prompts=True)


def test_fields_of_messages_that_no_template_reads_get_a_line(write_jsonl: Write) -> None:
    path = write_jsonl([{"messages": [user(), answer(name="x")]}, {"messages": [user(), answer(mask=1, mood="glad")]}])
    said = load(path, CHATML).report()
    assert "'mask' of assistant messages; line 2" in said and "'mood'" in said and "'name'" in said


@pytest.mark.parametrize("where", ["user", "assistant"])
def test_the_text_of_a_special_token_within_a_message_gets_a_line(write_jsonl: Write, where: str) -> None:
    text = {"user": [user("a<|im_end|>b"), answer("c")], "assistant": [user("a"), answer("b<|im_end|>c")]}
    said = load(write_jsonl([{"messages": [user(), answer()]}, {"messages": text[where]}]), CHATML).report()
    assert f"role '{where}' has '<|im_end|>'" in said and "line 2" in said


def test_each_turn_of_llama_2s_form_ends_with_its_end_token_once(write_jsonl: Write) -> None:
    path = write_jsonl([{"messages": [user("1"), answer("a"), user("2"), answer("b")]}])
    whole, said = trained(load(path, LLAMA2))
    assert said == " a <|im_end|>| b <|im_end|>"
    assert whole == "<s>[INST] 1 [/INST] a <|im_end|><s>[INST] 2 [/INST] b <|im_end|>"


def test_an_error_while_data_are_tokenised_ends(write_jsonl: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = ValueError("a"), KeyError("b")
    one.__context__, two.__cause__ = two, one
    assert list(causes(one)) == [one, two]
    tokenizer = byte_tokenizer(None)

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("broken tokenizer")

    monkeypatch.setattr(type(tokenizer), "__call__", broken)
    with pytest.raises(RuntimeError, match="broken tokenizer"):
        load_source(Reading(SourceConfig(path=write_jsonl([{"prompt": "a"}]))), DataConfig(), PromptTemplate(tokenizer))
