"""Where prompts come from, and how answers are checked."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from braidrl.config.section import (
    MOST_PROCESSES,
    MOST_ROWS,
    MOST_S,
    MOST_STEPS,
    MOST_TOKENS,
    ONE_OR_MORE,
    Name,
    SandboxConfig,
    Section,
)


class VerifierConfig(Section):
    """One rule reward."""

    short_for = {str: "name"}
    name: str
    """A verifier (exact, gsm8k, math, format, f1, ifeval, code, judge, remote), or `module:function` or `file.py:function` of your own."""
    weight: float = 1.0
    """Its share of `reward`."""
    params: dict[str, Any] = {}
    """Settings handed to it by keyword."""


class SourceConfig(Section):
    """One data file or data set."""

    short_for = {str: "path", Path: "path"}
    path: Path
    """A .jsonl, .json or .parquet file, a folder of such files, or a data set of the hub, `ORG/SET` or `ORG/SET@revision`."""
    subset: str | None = None
    """Of a folder or a data set of the hub: which of its subsets."""
    split: str | None = None
    """Of a folder or a data set of the hub: which of its splits; by default `train`, for `data.eval` `test`, or the only one."""
    where: dict[str, Any] = {}
    """Fields and the value, or list of values, that a record must have there; others are left out."""
    convert: str | None = None
    """What makes an example of a record: a name of `braid list conversions`, or `module:function` or `file.py:function` of your own, which
    gets the record and returns a dict, or a text that says why it is left out. By default records are taken as they are, those of a data
    set of the hub that Braid knows by its conversion."""
    unique: bool = False
    """Leave out a prompt that was there before."""
    skip: int = Field(0, ge=0, le=MOST_STEPS)
    """Leave out the first so many of these examples."""
    first: int | None = Field(None, ge=1, le=MOST_STEPS)
    """Take only so many of them."""
    weight: float = Field(1.0, gt=0, le=1e9)
    """How often a prompt is drawn from this source, relative to the others."""
    verify: Annotated[list[VerifierConfig] | None, ONE_OR_MORE] = None
    """This source's own verifiers, in place of `reward.verify`."""
    prompt_field: str = "prompt"
    """Field with the prompt, text or chat messages. A dot enters nested fields."""
    answer_field: str = "answer"
    """Field with the reference answer; `reward_model.ground_truth` is taken where this one is absent."""
    response_field: str = "response"
    """Field with a given response, for supervised training, text or messages; where it is absent `completion`, `messages` or
    `conversations` is taken, with the prompt in it."""
    chosen_field: str = "chosen"
    """Field with the better response of a pair, for reward models and DPO: text, or messages, with or without the prompt."""
    rejected_field: str = "rejected"
    """Field with the worse one."""
    tools_field: str = "tools"
    """Field with the tools of a row, a list of functions as chat templates take them, or its JSON as text; null means none."""
    template_field: str = "chat_template_kwargs"
    """Field with arguments of the chat template for a row, over those of `template`."""
    template: dict[str, Any] = {}
    """Arguments of the chat template for this source, over those of `data.template`."""
    train_on: Literal["all", "last"] = "all"
    """Of a conversation that is trained on: all assistant turns, or the last one."""
    convert_version: str | None = None
    """The version of your own `convert`, which you change with its code. Without one its results are not kept for later runs."""

    @property
    def label(self) -> str:
        """Return the source's name in metrics: the file's, or that of a data set of the hub."""
        fetched = next((part for part in self.path.parts if part.startswith("datasets--")), None)
        return fetched.rpartition("--")[2] if fetched else self.path.stem


class DataConfig(Section):
    """Where prompts come from."""

    train: Annotated[list[SourceConfig], ONE_OR_MORE] = []
    """One file, or several with weights."""
    eval: dict[Name, SourceConfig] = {}
    """Held-out sets by name."""
    held_out: int = Field(0, ge=0, le=MOST_STEPS)
    """Keep the first so many examples of the first of `train` from training, as an evaluation set named `held_out`."""
    in_memory: int = Field(200_000, ge=0, le=MOST_STEPS)
    """A source with more examples than this is kept, tokenised, in `cache`, where the next run finds it. Others are read by each run."""
    cache: Path = Path("~/.cache/braid/data")
    """The folder of the sources that are kept."""
    ptx: SourceConfig | None = None
    """Plain text whose likelihood the policy keeps (`ptx_coef`); its `prompt_field` names the text."""
    system_prompt: str | None = None
    """Put before every chat prompt."""
    chat_template: bool = True
    """Render prompts with the tokenizer's chat template where it has one; plain text otherwise."""
    template: dict[str, Any] = {}
    """Arguments of the chat template, such as `enable_thinking: false`; a source and a row may have their own."""
    max_prompt_tokens: int = Field(1024, ge=1, le=MOST_TOKENS)
    """Longer prompts are dropped, and the number dropped is reported."""
    shuffle: bool = True
    """A new seeded order each epoch; off keeps the file's."""

    @model_validator(mode="after")
    def _held_out(self) -> "DataConfig":
        if self.held_out and "held_out" in self.eval:
            raise ValueError("data.eval has a set of the name held_out already; give it another")
        if self.held_out and self.train and (self.train[0].first or self.held_out + 1) <= self.held_out:
            raise ValueError("held_out leaves nothing of what `first` takes")
        return self

    @property
    def training_sources(self) -> list[SourceConfig]:
        """Return the sources of `train` without what is held out of the first."""
        if not self.held_out or not self.train:
            return self.train
        first, *others = self.train
        skip = first.skip + self.held_out
        left = None if first.first is None else first.first - self.held_out
        return [first.model_copy(update={"skip": skip, "first": left}), *others]

    @property
    def evaluation_sources(self) -> dict[str, SourceConfig]:
        """Return the held-out sets by name, with what is held out of `train`."""
        sets = dict(self.eval)
        if self.held_out and self.train:
            sets["held_out"] = self.train[0].model_copy(update={"first": self.held_out, "weight": 1.0})
        return sets


class RewardConfig(SandboxConfig):
    """How answers are checked."""

    verify: Annotated[list[VerifierConfig], ONE_OR_MORE] = [VerifierConfig(name="exact")]
    """One verifier or several; `reward` is their weighted sum."""
    correct_score: float | None = None
    """Score of a right answer where a verifier gives only right or wrong; by default the recipe's (GRPO 1, DAPO 1)."""
    wrong_score: float | None = None
    """Score of a wrong answer; by default the recipe's (GRPO 0, DAPO -1)."""
    skip_special_tokens: bool = False
    """Leave all special tokens out of the text that verifiers get and runs record. By default only padding and ends of sequence are left
    out, so that a format such as `<think>` can be checked."""
    max_abs: float = Field(1e6, gt=0)
    """A verifier's or environment's score further from 0 than this counts as that row's failure."""
    max_failed_fraction: float = Field(0.99, ge=0, le=1)
    """The run ends, with its checkpoint saved and exit code 1, where a larger share of a step's checks, or of its trajectories in their
    environment, failed; 1 goes on whatever fails."""
    max_failed_steps: int = Field(1, ge=0, le=MOST_ROWS)
    """How many such steps in a row end it; 0 never."""
    timeout_s: float = Field(10.0, gt=0, le=MOST_S)
    """Seconds for one verifier on one row; after them that check counts as failed and its process is replaced."""
    processes: int = Field(1, ge=0, le=MOST_PROCESSES)
    """Processes that check answers beside generation. With 0 verifiers that are not `async` are called in the run's own process, without
    limits or a sandbox, so that a `breakpoint()` in them stops there."""
    environment: list[str] = []
    """Variables that verifiers get of the run's environment, beside PATH and the like."""
