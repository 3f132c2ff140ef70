"""Configuration of data sources and rewards."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from braidrl.config.section import (
    MOST_PIXELS,
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
    """A verifier (exact, gsm8k, math, format, f1, ifeval, code, judge, remote), or your own `module:function` or
    `file.py:function`.
    """
    weight: float = 1.0
    """Weight in `reward`."""
    params: dict[str, Any] = {}
    """Keyword arguments for it."""


class SourceConfig(Section):
    """One data file or data set."""

    short_for = {str: "path", Path: "path"}
    path: Path
    """A .jsonl, .json or .parquet file, a folder of such files, or a data set of the hub, `ORG/SET` or
    `ORG/SET@revision`.
    """

    @field_validator("path")
    @classmethod
    def _may_be_read_again(cls, path: Path) -> Path:
        # Refused before torch is loaded, which takes seconds.
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ValueError("pipes and devices are not read; write the contents to a file, and give that")
        return path

    subset: str | None = None
    """Subset of a folder or a data set of the hub."""
    split: str | None = None
    """Split of a folder or a data set of the hub; by default `train`, for `data.eval` `test`, or the only one."""
    where: dict[str, Any] = {}
    """Filter: fields and the value, or list of values, that a record must have; other records are skipped."""
    convert: str | None = None
    """Conversion of a record to an example: a name from `braid list conversions`, or your own `module:function` or
    `file.py:function`. It receives the record and returns a dict, or a text with the reason to skip it. By default
    records are used as they are; a data set of the hub that Braid knows has its own conversion.
    """
    unique: bool = False
    """Skip repeated prompts."""
    skip: int = Field(0, ge=0, le=MOST_STEPS)
    """Skip this number of examples at the start."""
    first: int | None = Field(None, ge=1, le=MOST_STEPS)
    """Then use only this number of examples."""
    weight: float = Field(1.0, gt=0, le=1e9)
    """Sampling weight of this source, relative to the others."""
    verify: Annotated[list[VerifierConfig] | None, ONE_OR_MORE] = None
    """This source's own verifiers, in place of `reward.verify`."""
    prompt_field: str = "prompt"
    """Field with the prompt, text or chat messages. A dot enters nested fields."""
    answer_field: str = "answer"
    """Field with the reference answer; if it is absent, `reward_model.ground_truth` is used."""
    response_field: str = "response"
    """Field with a given response, for supervised training, text or messages; if it is absent, `completion`, `messages`
    or `conversations` is used, which may include the prompt.
    """
    chosen_field: str = "chosen"
    """Field with the better response of a pair, for reward models and DPO: text, or messages, with or without the
    prompt.
    """
    rejected_field: str = "rejected"
    """Field with the worse response."""
    images_field: str = "images"
    """Field with a row's images, or one: paths (relative to the data file), bytes, data: URIs. `image` is read where it
    is absent. They stand at the marks `<image>` in text, or at parts `{type: image}` of messages.
    """
    tools_field: str = "tools"
    """Field with a row's tools: a list of functions as in chat templates, or the same as JSON text; null means none."""
    template_field: str = "chat_template_kwargs"
    """Field with a row's chat template arguments, which override `template`."""
    template: dict[str, Any] = {}
    """Chat template arguments for this source, which override `data.template`."""
    train_on: Literal["all", "last"] = "all"
    """Trained turns of a given conversation: all assistant turns, or the last one."""
    convert_version: str | None = None
    """Version of your own `convert`; change it with its code.

    Without a version the converted data is not cached for later runs.
    """

    @property
    def label(self) -> str:
        """Return the source's name in metrics: the name of the file or of the data set on the hub."""
        fetched = next((part for part in self.path.parts if part.startswith("datasets--")), None)
        return fetched.rpartition("--")[2] if fetched else self.path.stem


class CurriculumConfig(Section):
    """The choice of prompts by their success rate so far, within each source; the sources' weights are unchanged."""

    short_for = {str: "name"}
    name: str
    """A curriculum from `braid list curricula`, or your own `module:function` or `file.py:function`."""
    by: str | None = None
    """Field of the data, such as a level, whose values have one pass rate each; a dot enters nested fields. By default
    each example has its own.
    """
    step: float = Field(0.3, gt=0, le=1)
    """Weight of the newest group in the moving average of a pass rate."""
    params: dict[str, Any] = {}
    """Keyword arguments for it."""


class ImagesConfig(Section):
    """Images in the data of a model that sees."""

    folder: Path = Path("~/.cache/braid/images")
    """Folder of the images, each under the hash of its content; processes on all machines of a run must see it."""
    min_pixels: int | None = Field(None, ge=1, le=MOST_PIXELS)
    """Least number of pixels to which a smaller image is enlarged; by default that of the model's image processor."""
    max_pixels: int | None = Field(None, ge=1, le=MOST_PIXELS)
    """Largest number of pixels to which a larger image is reduced, likewise; tokens grow with it."""
    most_pixels: int = Field(1 << 25, ge=1, le=MOST_PIXELS)
    """An image with more pixels counts as broken and is not decoded."""
    broken: Literal["error", "skip"] = "error"
    """A broken image ends the run with a line, or its record is skipped and counted."""
    fetch: bool = False
    """Fetch the images whose addresses (`https://...`) data files give. Each is fetched once and stays in `folder`;
    those of environments and agents are not fetched.
    """
    kept_mib: float = Field(512, ge=0, le=1 << 20)
    """MiB of encoded images that each role keeps on its device while the vision tower is frozen."""


class DataConfig(Section):
    """Sources of prompts."""

    train: Annotated[list[SourceConfig], ONE_OR_MORE] = []
    """Training data: one file, or several with weights."""
    eval: dict[Name, SourceConfig] = {}
    """Held-out sets by name."""
    held_out: int = Field(0, ge=0, le=MOST_STEPS)
    """Reserve this number of examples, the first of the first source in `train`, as an evaluation set named `held_out`.
    """
    in_memory: int = Field(200_000, ge=0, le=MOST_STEPS)
    """A source with more examples than this is tokenised once and kept in `cache` for later runs.

    Each run reads smaller sources anew.
    """
    cache: Path = Path("~/.cache/braid/data")
    """Folder for tokenised sources."""
    ptx: SourceConfig | None = None
    """Pre-training text for a language-model loss (`ptx_coef`); its `prompt_field` names the field with the text."""
    system_prompt: str | None = None
    """System message before every chat prompt."""
    chat_template: bool = True
    """Render prompts with the tokenizer's chat template if it has one; otherwise prompts are plain text."""
    template: dict[str, Any] = {}
    """Chat template arguments, such as `enable_thinking: false`; a source and a row may override them."""
    max_prompt_tokens: int = Field(1024, ge=1, le=MOST_TOKENS)
    """Maximum length of a prompt; longer prompts are dropped and counted."""
    images: ImagesConfig = ImagesConfig()
    """Images, for models that see."""
    shuffle: bool = True
    """Shuffle each epoch with the seed; false keeps the file's order."""
    curriculum: CurriculumConfig | None = None
    """Draw more of the prompts that teach most, in place of epochs."""

    @model_validator(mode="after")
    def _held_out(self) -> "DataConfig":
        if self.held_out and "held_out" in self.eval:
            raise ValueError("data.eval has a set of the name held_out already; give it another")
        if self.held_out and self.train and (self.train[0].first or self.held_out + 1) <= self.held_out:
            raise ValueError("held_out leaves nothing of what `first` takes")
        return self

    @property
    def training_sources(self) -> list[SourceConfig]:
        """Return the sources of `train` without the held-out examples of the first."""
        if not self.held_out or not self.train:
            return self.train
        first, *further = self.train
        skip = first.skip + self.held_out
        left = None if first.first is None else first.first - self.held_out
        return [first.model_copy(update={"skip": skip, "first": left}), *further]

    @property
    def evaluation_sources(self) -> dict[str, SourceConfig]:
        """Return the held-out sets by name, including the examples held out of `train`."""
        sets = dict(self.eval)
        if self.held_out and self.train:
            sets["held_out"] = self.train[0].model_copy(update={"first": self.held_out, "weight": 1.0})
        return sets


class RewardConfig(SandboxConfig):
    """Verification of answers."""

    verify: Annotated[list[VerifierConfig], ONE_OR_MORE] = [VerifierConfig(name="exact")]
    """One verifier or several; `reward` is their weighted sum."""
    correct_score: float | None = None
    """Score of a right answer, for verifiers that return only right or wrong; by default the recipe's (GRPO 1, DAPO 1).
    """
    wrong_score: float | None = None
    """Score of a wrong answer; by default the recipe's (GRPO 0, DAPO -1)."""
    skip_special_tokens: bool = False
    """Remove all special tokens from the text for verifiers, environments and records. By default only padding and
    end-of-sequence tokens are removed, so that a format such as `<think>` can be checked.
    """
    max_abs: float = Field(1e6, gt=0)
    """Largest valid absolute score of a verifier or environment; a larger one counts as a failure of the row."""
    max_failed_fraction: float = Field(0.99, ge=0, le=1)
    """The run ends, with a checkpoint and exit code 1, if a larger share of a step's checks or trajectories fails; 1
    never ends it.
    """
    max_failed_steps: int = Field(1, ge=0, le=MOST_ROWS)
    """Number of consecutive such steps that end the run; 0 never ends it."""
    timeout_s: float = Field(10.0, gt=0, le=MOST_S)
    """Seconds for one verifier on one row; after this time the verification counts as failed and its process is
    replaced.
    """
    processes: int = Field(1, ge=0, le=MOST_PROCESSES)
    """Number of processes for verification. With 0, verifiers that are not `async` are called in the run's own process,
    without limits or a sandbox, so that a `breakpoint()` in them works.
    """
    environment: list[str] = []
    """Environment variables that verifiers receive from the run, in addition to PATH and the like."""
