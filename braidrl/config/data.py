"""Where prompts come from, and how answers are checked."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from braidrl.config.section import ONE_OR_MORE, SandboxConfig, Section


class VerifierConfig(Section):
    """One rule reward."""

    short_for = {str: "name"}
    name: str
    """A verifier (exact, gsm8k, math, format) or `module:function`."""
    weight: float = 1.0
    """Its share of `reward`."""
    params: dict[str, Any] = {}
    """Settings handed to it by keyword."""


class SourceConfig(Section):
    """One data file."""

    short_for = {str: "path", Path: "path"}
    path: Path
    """A .jsonl or .parquet file."""
    weight: float = Field(1.0, gt=0)
    """How often a prompt is drawn from this source, relative to the others."""
    verify: Annotated[list[VerifierConfig] | None, ONE_OR_MORE] = None
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


class DataConfig(Section):
    """Where prompts come from."""

    train: Annotated[list[SourceConfig], ONE_OR_MORE] = []
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


class RewardConfig(SandboxConfig):
    """How answers are checked."""

    verify: Annotated[list[VerifierConfig], ONE_OR_MORE] = [VerifierConfig(name="exact")]
    """One verifier or several; `reward` is their weighted sum."""
    correct_score: float | None = None
    """Score of a right answer where a verifier gives only right or wrong; by default the recipe's (GRPO 1, DAPO 1)."""
    wrong_score: float | None = None
    """Score of a wrong answer; by default the recipe's (GRPO 0, DAPO -1)."""
    max_abs: float = Field(1e6, gt=0)
    """A verifier's or environment's score further from 0 than this counts as that row's failure."""
    timeout_s: float = Field(10.0, gt=0)
    """Seconds for one verifier on one row; after them that check counts as failed and its process is replaced."""
    processes: int = Field(1, ge=0)
    """Processes that check answers beside generation. With 0 verifiers that are not `async` are called in the run's own process, without
    limits or a sandbox, so that a `breakpoint()` in them stops there."""
    environment: list[str] = []
    """Variables that verifiers get of the run's environment, beside PATH and the like."""
