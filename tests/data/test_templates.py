from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from braidrl.algorithms.ragged import Ragged
from braidrl.data.rows import IDENTITY, Objects, Rows
from braidrl.data.templates import PromptTemplate, retokenized
from braidrl.errors import UserError

USER = {"role": "user", "content": "hi"}


def test_text_and_one_user_message_open_the_assistants_turn_alike(chat_tokenizer: Any) -> None:
    template = PromptTemplate(chat_tokenizer)
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert template.render("hi") == template.render([USER]) == expected
    ids = template.encode("hi")
    assert chat_tokenizer.decode(ids) == expected
    assert ids == chat_tokenizer.apply_chat_template([USER], add_generation_prompt=True, return_dict=False)


def test_the_system_prompt_comes_first_unless_the_example_has_its_own(chat_tokenizer: Any) -> None:
    template = PromptTemplate(chat_tokenizer, system_prompt="Be brief.")
    assert template.render("hi").startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi")
    own = [{"role": "system", "content": "Rhyme."}, USER]
    assert "Be brief." not in template.render(own)
    assert template.render(own).startswith("<|im_start|>system\nRhyme.<|im_end|>\n<|im_start|>user\nhi")
    assert own == [{"role": "system", "content": "Rhyme."}, {"role": "user", "content": "hi"}]


@pytest.mark.parametrize("off", [True, False])
def test_without_a_template_prompts_are_plain_text(chat_tokenizer: Any, plain_tokenizer: Any, off: bool) -> None:
    template = PromptTemplate(chat_tokenizer, chat_template=False) if off else PromptTemplate(plain_tokenizer)
    assert not template.is_chat
    assert template.render("1+1=") == "1+1="
    assert template.tokenizer.decode(template.encode("1+1=")) == "1+1="
    assert template.render([{"role": "system", "content": "a"}, USER]) == "a\n\nhi"
    assert PromptTemplate(plain_tokenizer, system_prompt="Add.").render("1+1=") == "Add.\n\n1+1="


def test_prompts_encoded_together_are_those_encoded_alone(chat_tokenizer: Any) -> None:
    template = PromptTemplate(chat_tokenizer)
    prompts = ["a", "longer than that", "ü"]
    together = template.encode_texts([template.render(prompt) for prompt in prompts], begins=not template.is_chat)
    assert together == [template.encode(prompt) for prompt in prompts]


def test_a_response_is_its_own_tokens_and_the_end_of_sequence(chat_tokenizer: Any) -> None:
    ids, empty = PromptTemplate(chat_tokenizer).encode_responses(["42", ""])
    assert ids[-1] == chat_tokenizer.eos_token_id
    assert chat_tokenizer.decode(ids[:-1]) == "42"
    assert empty == [chat_tokenizer.eos_token_id]


def test_a_tokenizer_without_an_end_of_sequence_cannot_train_on_responses(plain_tokenizer: Any) -> None:
    tokenizer = type(plain_tokenizer)(tokenizer_object=plain_tokenizer.backend_tokenizer)
    with pytest.raises(UserError, match=r"no eos_token, .*set .*tokenizer_config"):
        PromptTemplate(tokenizer).encode_responses(["42"])


def test_messages_that_the_template_refuses_are_a_users_mistake(chat_tokenizer: Any) -> None:
    with pytest.raises(UserError, match=r"template refuses .*: unknown role"):
        PromptTemplate(chat_tokenizer).encode([{"role": "wizard", "content": "hi"}])


def test_a_turn_that_ends_by_the_templates_token_ends_in_another_tokenizer_too(chat_tokenizer: Any) -> None:
    # As of Qwen2.5's base models: the tokenizer's end of sequence is not the token that closes a turn.
    base = PreTrainedTokenizerFast(tokenizer_object=chat_tokenizer.backend_tokenizer, eos_token="<|im_start|>")
    base.chat_template = chat_tokenizer.chat_template
    template = PromptTemplate(chat_tokenizer)
    prompt, answer = template.encode("hi"), template.encode_responses(["42"])[0]
    rows = Rows(
        {
            **{name: torch.zeros(1, dtype=torch.int64) for name in IDENTITY},
            "tokens": Ragged.from_rows([prompt + answer], torch.int64),
            "prompt_length": torch.tensor([len(prompt)]),
            "metadata": Objects(({"prompt": "hi"},)),
        }
    )
    assert answer[-1] != base.eos_token_id
    assert retokenized(rows, base, template)["tokens"].tolist() == [prompt + answer]
