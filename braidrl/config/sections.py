"""The whole configuration as typed models. Every key has a default that suits one machine; an unknown key is an error.

flow: dapo                      # a recipe, a YAML flow, or module:function
model: /models/Qwen2.5-0.5B     # any Hugging Face directory
data: {train: data/train.parquet, eval: {test: data/test.parquet}}
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from braidrl.algorithms.metrics import REFLECTION_PHRASES
from braidrl.models.layout import ParallelLayout

DType = Literal["float32", "bfloat16", "float64"]


class Section(BaseModel):
    """A part of the configuration; refuses keys that it does not have."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())


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
        return short_verifiers(value)


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
        return short_verifiers(value)


class EnvironmentConfig(Section):
    """What trajectories of several turns are played in."""

    name: str | None = None
    """`module:Class`, `module:function`, `gem:name` or `agent:module:function`, for the generate stages that name none themselves.
    What it gives is the score and the reward: the flow's `verify` is then left out."""
    params: dict[str, Any] = {}
    """Settings handed to it by keyword."""
    at_once: int = Field(64, ge=1)
    """Trajectories that are played at the same time."""
    timeout_s: float = Field(60.0, gt=0)
    """Seconds for one answer of the environment, or for an agent's whole trajectory; after them it ends, and is counted."""
    max_turns: int = Field(16, ge=1)
    """Turns of the model in one trajectory."""


class ServersConfig(Section):
    """Servers of somebody else's that generate, with `rollout.engine: http`."""

    urls: list[str] = []
    """Their addresses, as in `http://127.0.0.1:8000`; a router spreads rows over them."""
    dialect: str = "vllm"
    """What they are: `vllm` or `sglang`."""
    folder: Path | None = None
    """Where weights are put for them to read: a folder that they and the run see under one name. By default this machine's place for
    temporary files."""

    @field_validator("urls", mode="before")
    @classmethod
    def _one_or_more(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


class RolloutConfig(Section):
    """How responses are sampled."""

    engine: str = "embedded"
    """Who generates: `embedded` decodes with the trainer's own weights, `vllm` in processes of its own, `http` asks servers."""
    servers: ServersConfig = ServersConfig()
    """An address, or a list of them, is short for servers with nothing else set."""
    engines: int | None = Field(None, ge=0)
    """Processes that generate, each with a copy of the weights; a router spreads rows over them, and replaces one that ends.
    By default 1 for vLLM, and for the embedded engine 0: the process that trains generates too."""
    python: Path | None = None
    """The interpreter of those processes, where vLLM is installed in an environment of its own; by default Braid's."""
    vllm: dict[str, Any] = {}
    """Further arguments of vLLM's engine, as in `{gpu_memory_utilization: 0.5}`."""
    check_weights: bool = False
    """Have each of those processes compare a checksum of the weights that it is given."""
    max_log_prob_gap: float = Field(0.2, gt=0)
    """The run ends where log-probs of engine and trainer differ by more than this on average, in nats per token."""
    samples_per_prompt: int = Field(8, ge=1)
    """Rows in a group."""
    max_response_tokens: int = Field(512, ge=1)
    """Responses end here at the latest."""
    temperature: float = Field(1.0, gt=0)
    """Logits are divided by it, in sampling and in every log-probability."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Tokens are drawn from the likeliest that have this share together; 1 keeps all."""
    top_k: int = Field(0, ge=0)
    """0 keeps all tokens."""
    stop: list[str] = []
    """A response ends where one of these texts appears."""
    stop_token_ids: list[int] = []
    """In addition to the tokenizer's end of sequence."""
    slots: int = Field(64, ge=1)
    """Rows that the embedded engine decodes at once."""
    dtype: DType | None = None
    """Of the engine's weights; by default the model's, which are then shared with the trainer and not copied."""
    compile: bool = True
    """Decode on a CPU by kernels compiled for it, in about a second once; by torch where there is no C compiler or the model is another
    than a Qwen2, Qwen3 or Llama."""
    max_sequence_tokens: int | None = Field(None, ge=2)
    """Where generation ends a sequence, prompt included; by default `data.max_prompt_tokens` and `max_response_tokens` together.
    With an environment `max_response_tokens` is the limit of one turn, and this one that of all turns."""
    environment: EnvironmentConfig = EnvironmentConfig()
    """A name is short for an environment with nothing else set."""

    @field_validator("environment", mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @field_validator("servers", mode="before")
    @classmethod
    def _addresses(cls, value: Any) -> Any:
        return {"urls": value} if isinstance(value, str | list) else value

    reflection_phrases: list[str] = list(REFLECTION_PHRASES)
    """Phrases of a response that reconsiders itself, counted in `response/reflections`; none counts nothing."""


class TrainerConfig(Section):
    """How long, how much at once, and the optimizer."""

    steps: int = Field(100, ge=0)
    """Iterations."""
    prompts_per_step: int = Field(32, ge=1)
    """Groups in a batch, after selection."""
    rows_per_update: int | None = Field(None, ge=1)
    """Rows of one optimizer step; by default the whole batch."""
    epochs: int = Field(1, ge=1)
    """Passes over a batch."""
    max_tokens_per_device: int = Field(8192, ge=1)
    """Tokens of a micro-batch; the only dial for memory, without effect on the result."""
    learning_rate: float = Field(1e-6, ge=0)
    """Of AdamW, after warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the learning rate does after its warm-up, over `steps`."""
    warmup_steps: int = Field(0, ge=0)
    """Iterations over which the learning rate rises from 0."""
    weight_decay: float = Field(0.0, ge=0)
    """Of AdamW, applied to the weights and not to the gradient."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Of AdamW: how long the two moments remember."""
    epsilon: float = Field(1e-8, gt=0)
    """Of AdamW, added to the root of the second moment."""
    max_grad_norm: float | None = Field(1.0, gt=0)
    """A longer gradient is scaled down to this norm; none does not clip."""
    share_prompts: bool = False
    """Rows of a group put their prompt through the model once, in inference and training, where that makes a quarter of the tokens go
    away. Log-probs and gradients are the same up to rounding."""
    compile: bool = True
    """Norms and gated activations on a CPU by kernels compiled for it, in about a second once; by torch where there is no C compiler."""
    layout: ParallelLayout = ParallelLayout()
    """How each role lies on the devices of `runtime: distributed`; by default each has a copy of the model."""
    activation_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, about a third more time."""
    checkpoint_every: int = Field(50, ge=0)
    """Iterations between checkpoints; 0 keeps only the one at the end."""
    keep_checkpoints: int = Field(2, ge=1)
    """The last so many stay, older ones are removed."""
    deterministic: bool = False
    """Only deterministic kernels, so that a resumed run repeats the uninterrupted one to the bit."""
    surplus: Literal["drop", "keep"] = "drop"
    """What happens to selected groups that a batch has no room for."""
    max_staleness: int = Field(0, ge=0)
    """By how many versions a row may lag behind the weights it trains (streaming)."""


class EvaluationConfig(Section):
    """A second flow (generate, verify) with its own random numbers."""

    every: int = Field(10, ge=0)
    """Iterations between evaluations; 0 never."""
    before_first_step: bool = True
    """Evaluate the untrained model too."""
    samples: int = Field(8, ge=1)
    """Responses per prompt: the k of avg@k; pass@ is reported for every power of two up to it."""
    temperature: float = Field(1.0, ge=0)
    """0 takes the likeliest token."""
    top_p: float = Field(0.7, gt=0, le=1)
    """As `rollout.top_p`, for evaluation."""
    top_k: int = Field(0, ge=0)
    """As `rollout.top_k`, for evaluation."""
    max_prompts: int | None = Field(None, ge=1)
    """The first so many prompts of each set; all by default."""
    stop_at: float | None = Field(None, gt=0, le=1)
    """The run ends, before `trainer.steps`, when an evaluation finds avg@k (or pair accuracy) of every set at least this high."""


class StreamingConfig(Section):
    """How the streaming runtime spreads work; nothing here changes the result of a run without staleness."""

    workers: dict[str, int] = {}
    """Processes of a worker group, 1 where not named: `actor.generate`, `compute`, and each role that infers or trains."""
    dispatch_rows: int = Field(16, ge=1)
    """The most rows that a worker takes at once: fewer spread work sooner, more ask the queue less often."""
    weights: Literal["end", "delayed"] = "end"
    """An engine takes new weights when it has finished the rows that it has. With `delayed` it receives them while it goes on
    generating, and all engines load them together when the batch's generation is over."""
    lease_s: float = Field(600.0, gt=0)
    """Seconds without progress after which a worker's rows are given to another."""
    wait_s: float = Field(5.0, gt=0)
    """Seconds after which a worker that has found nothing to do asks again."""

    @field_validator("workers")
    @classmethod
    def _positive(cls, value: dict[str, int]) -> dict[str, int]:
        if any(count < 1 for count in value.values()):
            raise ValueError("a worker group has at least one process")
        return value


class RoleConfig(Section):
    """Settings of one role that differ from the run's."""

    model: Path | None = None
    """A model of its own; by default the run's."""
    learning_rate: float | None = Field(None, ge=0)
    """By default the trainer's."""
    dtype: DType | None = None
    """By default the run's."""
    layout: ParallelLayout | None = None
    """By default the trainer's."""
    generate_workers: int | None = Field(None, ge=1)
    """Ranks that generate for this role under `runtime: distributed`, from the first on; by default all."""


class PoolConfig(Section):
    """Roles that share their processes."""

    roles: list[str] = Field(min_length=1)
    """Their names."""
    workers: int | None = Field(None, ge=1)
    """Processes, each with a device of its own; by default the configuration's `workers`."""


class PlacementConfig(Section):
    """Which roles share processes: a name (colocate, standalone, split), or the pools themselves."""

    name: str = "colocate"
    """`colocate`: one pool for all; `standalone`: one for each role; `split`: one for the roles that generate, one for the others."""
    pools: list[PoolConfig] = []
    """Each role in one of them, in place of a name."""


class ClusterConfig(Section):
    """The processes of a run, and the Ray cluster of `runtime: hybrid`."""

    launcher: Literal["local", "torchrun", "ray"] | None = None
    """Who starts the ranks of `runtime: distributed`: this command, on this machine; `torchrun`, which has started this command as one
    of them; or Ray, on its cluster. By default `torchrun` where there is one, else `local`."""
    address: str | None = None
    """Of a running cluster; by default RAY_ADDRESS, or a cluster of this machine that ends with the run."""
    cpus: int | None = Field(None, ge=1)
    """CPUs that a cluster of this machine offers, one for each worker; by default all."""
    start_limit_s: float = Field(300.0, gt=0)
    """Seconds for workers to start and load their models."""
    wait_limit_s: float = Field(3600.0, gt=0)
    """Seconds without a word from a worker after which the run ends."""


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
    """Of the weights in the forward pass; master weights and optimizer state are never less than float32."""
    seed: int = 0
    """Of everything random: order of the data, sampling, shuffles."""
    output: Path = Path("runs")
    """The folder in which run folders are made."""
    name: str | None = None
    """The run folder's name; by default the flow's with date and time."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of a process; by default all cores."""

    @property
    def max_sequence_tokens(self) -> int:
        """Tokens of a sequence, its prompt and all that follows it."""
        both = self.data.max_prompt_tokens + self.rollout.max_response_tokens
        return self.rollout.max_sequence_tokens or both

    @field_validator("placement", mode="before")
    @classmethod
    def _short_placement(cls, value: Any) -> Any:
        return short_placement(value)


def short_verifiers(value: Any) -> Any:
    """`gsm8k` and `[gsm8k, {name: format, weight: 0.1}]` are short for a list of verifiers."""
    if value is None:
        return None
    many = value if isinstance(value, list) else [value]
    return [{"name": item} if isinstance(item, str) else item for item in many]


def short_source(value: Any) -> Any:
    """A path is short for a source with nothing else set."""
    return {"path": value} if isinstance(value, str | Path) else value


def short_placement(value: Any) -> Any:
    """`split` is short for a name, `[[actor, reference], [critic]]` for pools."""
    if isinstance(value, str):
        return {"name": value}
    if isinstance(value, list):
        return {"pools": [{"roles": item} if isinstance(item, list) else item for item in value]}
    return value
