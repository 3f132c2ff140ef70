"""The whole configuration as typed models. Every key has a default that suits one machine; an unknown key is an error.

flow: dapo                      # a recipe, a YAML flow, or module:function
model: /models/Qwen2.5-0.5B     # any Hugging Face directory
data: {train: data/train.parquet, eval: {test: data/test.parquet}}
"""

import importlib.util
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from braidrl.config.data import DataConfig, RewardConfig
from braidrl.config.processes import ClusterConfig, PlacementConfig, StreamingConfig
from braidrl.config.rollout import RolloutConfig
from braidrl.config.section import ONE_OR_MORE, DType, Section
from braidrl.config.training import EvaluationConfig, RoleConfig, TrainerConfig


class TrackerConfig(Section):
    """One place to which a run's metrics go beside `metrics.jsonl`."""

    short_for = {str: "name"}
    name: str
    """`tensorboard`, `wandb`, or `module:name` or `file.py:name` of your own."""
    params: dict[str, Any] = {}
    """Settings handed to it by keyword; for `wandb`, further arguments of `wandb.init`."""


def default_trackers() -> list[TrackerConfig]:
    """Return TensorBoard, and wandb where it is installed and its environment says where to."""
    wandb = "WANDB_PROJECT" in os.environ and importlib.util.find_spec("wandb") is not None
    return [TrackerConfig(name="tensorboard"), *([TrackerConfig(name="wandb")] if wandb else [])]


class Config(Section):
    """A run."""

    flow: str
    """A recipe's name, a .yaml flow, `module:function` or `file.py:function`."""
    model: Path
    """A Hugging Face directory: weights, configuration and tokenizer."""
    algorithm: dict[str, Any] = {}
    """Settings of the recipe, such as `clip_high`."""
    data: DataConfig = DataConfig()
    """Where prompts come from."""
    reward: RewardConfig = RewardConfig()
    """How answers are checked."""
    rollout: RolloutConfig = RolloutConfig()
    """How responses are sampled."""
    trainer: TrainerConfig = TrainerConfig()
    """How long, how much at once, and the optimizer."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """When and how held-out sets are measured."""
    roles: dict[str, RoleConfig] = {}
    """Settings of single roles by name, as in `roles.critic.learning_rate=1e-5`."""
    trackers: Annotated[list[TrackerConfig], ONE_OR_MORE] = Field(default_factory=default_trackers)
    """Where metrics go beside `metrics.jsonl`; by default also to `wandb` where it is installed and WANDB_PROJECT is set."""
    runtime: Literal["eager", "hybrid", "distributed", "streaming"] = "eager"
    """Who decides what runs next: a loop in this process, a controller on Ray, nobody, or a queue."""
    placement: PlacementConfig = PlacementConfig()
    """Where roles live: `colocate`, `standalone`, `split`, or lists of roles as in `[[actor, reference], [critic]]`."""
    workers: int = Field(1, ge=1)
    """Processes of each pool, where the placement does not say; the ranks of `runtime: distributed`."""
    cluster: ClusterConfig = ClusterConfig()
    """Where and how long to wait for workers."""
    streaming: StreamingConfig = StreamingConfig()
    """Worker groups, queue and weights of `runtime: streaming`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes the CUDA device where there is one."""
    dtype: DType = "float32"
    """Type of the weights in the forward pass; master weights and optimizer state are never less than float32."""
    seed: int = 0
    """Seed of everything random: order of the data, sampling, shuffles."""
    output: Path = Path("runs")
    """The folder in which run folders are made."""
    name: str | None = None
    """The run folder's name; by default the flow's with date and time."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of a process, always; by default its share of the cores, and fewer while other programs use them."""

    @property
    def max_sequence_tokens(self) -> int:
        """Tokens of a sequence, its prompt and all that follows it."""
        both = self.data.max_prompt_tokens + self.rollout.max_response_tokens
        return self.rollout.max_sequence_tokens or both
