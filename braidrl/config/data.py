"""Where prompts come from, and how answers are checked."""

from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from braidrl.config.section import Section


class VerifierConfig(Section):
    """One rule reward."""

    name: str
    """A verifier (exact, gsm8k, math, format) or `module:function`."""
    weight: float = 1.0
    """Its share of `reward`."""
    params: dict[str, Any] = {}
    """Settings handed to it by keyword."""


class SourceConfig(Section):
    """One data file."""

    path: Path
    """A .jsonl or .parquet file."""
    weight: float = Field(1.0, gt=0)
    """How often a prompt is drawn from this source, relative to the others."""
    verify: list[VerifierConfig] | None = None
    """This source's own verifiers, in place of `reward.verify`."""
    prompt_field: str = "prompt"
    """Field with the prompt, text or chat messages. A dot enters nested fields."""
    answer_field: str = "answer"
    """Field with the reference answer; `reward_model.ground_truth` is taken where this one is absent."""
    response_field: str = "response"
    """Field with a given response, for supervised training."""
    chosen_field: str = "chosen"
    """Field with the better response of a pair, for reward models and DPO."""
    rejected_field: str = "rejected"
    """Field with the worse one."""

    @field_validator("verify", mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return short_names(value)


class DataConfig(Section):
    """Where prompts come from."""

    train: list[SourceConfig] = []
    """One file, or several with weights."""
    eval: dict[str, SourceConfig] = {}
    """Held-out sets by name."""
    ptx: SourceConfig | None = None
    """Plain text whose likelihood the policy keeps (`ptx_coef`); its `prompt_field` names the text."""
    system_prompt: str | None = None
    """Put before every chat prompt."""
    chat_template: bool = True
    """Render prompts with the tokenizer's chat template where it has one; plain text otherwise."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """Longer prompts are dropped, and the number dropped is reported."""
    shuffle: bool = True
    """A new seeded order each epoch; off keeps the file's."""

    @field_validator("train", mode="before")
    @classmethod
    def _one_or_more(cls, value: Any) -> Any:
        many = value if isinstance(value, list) else [value]
        return [short_source(item) for item in many]

    @field_validator("ptx", mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return short_source(value)

    @field_validator("eval", mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        return {name: short_source(item) for name, item in value.items()} if isinstance(value, dict) else value


class RewardConfig(Section):
    """How answers are checked."""

    verify: list[VerifierConfig] = [VerifierConfig(name="exact")]
    """One verifier or several; `reward` is their weighted sum."""
    correct_score: float | None = None
    """Score of a right answer where a verifier gives only right or wrong; by default the recipe's (GRPO 1, DAPO 1)."""
    wrong_score: float | None = None
    """Score of a wrong answer; by default the recipe's (GRPO 0, DAPO -1)."""
    timeout_s: float = Field(10.0, gt=0)
    """Seconds for one verifier on one row; after them that check counts as failed and its process is replaced."""
    processes: int = Field(1, ge=1)
    """Processes that check answers beside generation."""

    @field_validator("verify", mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return short_names(value)


def short_names(value: Any) -> Any:
    """`gsm8k` and `[gsm8k, {name: format, weight: 0.1}]` are short for a list of verifiers."""
    if value is None:
        return None
    many = value if isinstance(value, list) else [value]
    return [{"name": item} if isinstance(item, str) else item for item in many]


def short_source(value: Any) -> Any:
    """Return a path is short for a source with nothing else set."""
    return {"path": value} if isinstance(value, str | Path) else value
