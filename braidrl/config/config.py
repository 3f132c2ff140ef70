"""The whole configuration as typed models. Every key has a default that suits one machine; an unknown key is an error.

flow: dapo                      # a recipe, a YAML flow, or module:function
model: Qwen/Qwen2.5-0.5B        # a model of the hub, or any Hugging Face directory
data: {train: data/train.parquet, eval: {test: data/test.parquet}}
"""

import importlib.util
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from braidrl.config.data import DataConfig, RewardConfig
from braidrl.config.section import ONE_OR_MORE, DType, NotEmpty, SandboxConfig, Section
from braidrl.config.training import EvaluationConfig, RoleConfig, TrainerConfig


class StreamingConfig(Section):
    """How the streaming runtime spreads work; nothing here changes the result of a run without staleness."""

    workers: dict[str, int] = {}
    """Processes of a worker group: `actor.generate`, `compute`, and each role that infers or trains. Where not named 1, or as many as the
    role's layout needs."""
    dispatch_rows: int = Field(16, ge=1)
    """The most rows that a worker takes at once: fewer spread work sooner, more ask the queue less often."""
    sampler: str | dict[str, str] = "first_in"
    """Which of the rows that are ready a worker is given: `first_in`, `whole_groups`, `token_balanced`, `shortest_first`,
    `oldest_version`, or a function of yours, `module:function` or `path/to/file.py:function`; for all stages, or by stage."""
    storage: str = "shared_memory"
    """Where payload lies: `shared_memory`, `file:/path` on a disk, or `redis://host:port/0`."""
    weights: Literal["end", "delayed", "rolling", "interrupt"] = "end"
    """When engines take new weights. `end`: all of them when a batch's generation is over. `delayed`: so too, and they receive them in host
    memory while they generate. `rolling`: one after the other, while the others generate. `interrupt`: each at once, in the middle of its
    rows, which go on with them."""
    share_out: float | None = None
    """Has no effect: with `rolling` half of the engines may be out at a time. One that is out takes no rows, finishes most of those that
    it has, and loads."""
    on_policy_share: float = Field(0.0, ge=0, lt=1)
    """With `trainer.max_staleness`, the share of each batch that the version begins that the batch is trained on, spread evenly over its
    updates: the batch waits for these rows, and engines begin older ones of the next meanwhile. 0 asks for none."""
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


class PoolConfig(Section):
    """Roles that share their processes."""

    short_for = {list: "roles"}
    roles: list[str] = Field(min_length=1)
    """Their names."""
    workers: int | None = Field(None, ge=1)
    """Processes, each with a device of its own; by default the configuration's `workers`."""


class PlacementConfig(Section):
    """Which roles share processes: a name (colocate, standalone, split), or the pools themselves."""

    short_for = {str: "name", list: "pools"}
    name: str = "colocate"
    """`colocate`: one pool for all; `standalone`: one for each role; `split`: one for the roles that generate, one for the others."""
    pools: list[PoolConfig] = []
    """Each role in one of them, in place of a name; `ROLE.generate` puts a role's generation into another pool than its model."""


class ClusterConfig(Section):
    """The processes of a run, and the Ray cluster that they may be on."""

    launcher: Literal["local", "torchrun", "ray"] | None = None
    """Who starts the ranks of `runtime: distributed` and the workers of `runtime: streaming`: this command, on this machine; Ray, on its
    cluster; or, for ranks, `torchrun`, which has started this command as one of them, and is the default there. Else it is `local`."""
    address: str | None = None
    """Address of a running cluster; by default RAY_ADDRESS, or a cluster of this machine that ends with the run."""
    cpus: int | None = Field(None, ge=1)
    """CPUs that a cluster of this machine offers, one for each worker; by default all."""
    start_limit_s: float = Field(300.0, gt=0)
    """Seconds for workers to start and load their models."""
    silence_s: float = Field(60.0, gt=0)
    """Seconds after which a process that is stopped, or says nothing, is named and killed; another gets its work, or the run ends. So is
    one whose work does not come further for so long, and for ten times the longest that it took of late to come further."""
    wait_limit_s: float = Field(3600.0, gt=0)
    """Seconds without a word from a worker after which the run ends."""


class EnvironmentConfig(SandboxConfig):
    """What trajectories of several turns are played in."""

    short_for = {str: "name"}
    name: str | None = None
    """`module:Class`, `module:function`, `gem:name`, `mcp:server`, `openenv:address`, `verifiers:name` or `agent:module:function`,
    for the generate stages that name none themselves. What it gives is the score and the reward: the flow's `verify` is then left out."""
    params: dict[str, Any] = {}
    """Settings handed to it by keyword."""
    at_once: int = Field(64, ge=1)
    """Trajectories that are played at the same time in the whole run; each rank has its share of them, and at least one."""
    timeout_s: float = Field(60.0, gt=0)
    """Seconds for one answer of the environment, or for an agent's whole trajectory; after them it ends, and is counted."""
    max_turns: int = Field(16, ge=1)
    """Turns of the model in one trajectory."""
    variables: list[str] = []
    """Variables that it gets of the run's environment, beside PATH and the like."""
    host: str = "127.0.0.1"
    """Of an agent: the address of this machine on which its endpoint listens. One that others reach needs a key."""
    key_variable: str | None = None
    """The variable that holds the endpoint's key, which clients send as their API key; the agent finds it as `api_key` in its example."""
    tool_format: Literal["hermes", "qwen_xml", "llama", "mistral", "deepseek", "glm"] | None = None
    """How the model writes calls of tools; by default as its tokenizer's chat template says."""
    python: Path | None = None
    """The interpreter of its processes, where its library is installed in an environment of its own; by default Braid's."""

    @model_validator(mode="after")
    def _fits_the_sandbox(self) -> "EnvironmentConfig":
        if self.python is not None and self.sandbox == "none":
            raise ValueError(
                "python is the interpreter of processes, and sandbox=none plays in the run's own; remove one"
            )
        if self.host != "127.0.0.1" and self.sandbox == "bubblewrap":
            raise ValueError(
                "host is an address of this machine, and sandbox=bubblewrap has a network of its own; remove one"
            )
        return self


class ServersConfig(Section):
    """Servers of somebody else's that generate, with `rollout.engine: http`."""

    short_for = {str: "urls", list: "urls"}
    urls: Annotated[list[str], ONE_OR_MORE] = []
    """Their addresses, as in `http://127.0.0.1:8000`; a router spreads rows over them."""
    dialect: str = "vllm"
    """What they are: `vllm` or `sglang`."""
    weights: Literal["folder", "network"] = "folder"
    """How they get weights: they read them in `folder`, or the run sends them over the network (vLLM; NCCL on CUDA, else gloo)."""
    folder: Path | None = None
    """Where weights are put for them to read: a folder that they and the run see under one name. By default this machine's place for
    temporary files."""


class RolloutConfig(Section):
    """How responses are sampled."""

    engine: str = "embedded"
    """Who generates: `embedded` decodes with the trainer's own weights, `vllm` in processes of its own, `http` asks servers;
    or `module:name` or `file.py:name` of your own."""
    engine_settings: dict[str, Any] = {}
    """Settings of an engine of your own, which finds them in its spec's `options`."""
    servers: ServersConfig = ServersConfig()
    """An address, or a list of them, is short for servers with nothing else set."""
    engines: int | None = Field(None, ge=0)
    """Processes that generate, each with a copy of the weights; a router spreads rows over them, and replaces one that ends.
    By default 1 for vLLM, and 0 for the embedded engine and your own: the process that trains generates too."""
    tensor: int = Field(1, ge=1)
    """Processes that each of those engines consists of, where it is embedded: they divide its weights, heads and vocabulary, for a model
    that is too large for one device. A number that divides the model's heads and key/value heads. With `engines` 0, under `runtime:
    distributed` or `hybrid`, so many of the ranks that train decode together in the same way; see `grouping`."""
    pipeline: int = Field(1, ge=1)
    """Ranks among which the layers are divided, each with the slices of `tensor` of its own: for ranks that train and generate."""
    grouping: Literal["interval", "neighbour", "gather"] | None = None
    """Which ranks that train generate together, and what they receive. `interval`: ranks that lie apart, so that what each trains is
    part of what it generates with, and it receives the rest (HybridFlow); `neighbour`: the ranks of each copy gather all of it and keep
    their slices (HybridFlow-V); `gather`: all ranks gather it, for `shard: full` (DeepSpeed-Chat). By default `interval` where
    `pipeline` and `tensor` divide those of the training layout, else neighbours that receive what they lack."""
    python: Path | None = None
    """The interpreter of those processes, where vLLM is installed in an environment of its own; by default Braid's."""
    vllm: dict[str, Any] = {}
    """Further arguments of vLLM's engine, as in `{gpu_memory_utilization: 0.5}`."""
    weights: Literal["file", "collective"] | None = None
    """How those processes get weights from the ranks that train: a `file` in shared memory, or `collective`, from device to device over a
    process group (NCCL on CUDA, where each process needs a device of its own; gloo on a CPU). By default collective between CUDA
    devices, else a file."""

    @field_validator("weights", mode="before")
    @classmethod
    def _without_handles(cls, value: object) -> object:
        if value == "handles":
            raise ValueError("handles are not supported any more; write collective between CUDA devices, or file")
        return value

    check_weights: bool = False
    """Have each of those processes, or servers that are sent weights, compare a checksum of what it is given."""
    max_log_prob_gap: float = Field(0.2, gt=0)
    """The run ends where log-probs of engine and trainer differ by more than this on average, in nats per token."""
    samples_per_prompt: int = Field(8, ge=1)
    """Rows in a group."""
    max_response_tokens: int = Field(512, ge=1)
    """Responses end here at the latest."""
    tokens_per_iteration: int | None = Field(None, ge=1)
    """A response that has drawn so many tokens in one iteration is set aside, and goes on in the next one with its weights: no iteration
    waits for the longest. Under `streaming` an iteration is the time until the batch is whole that the response is drawn for. Needs
    `trainer.max_staleness`, which bounds the oldest token, and `trainer.surplus=keep`."""
    repeated_tokens: int | None = Field(None, ge=4)
    """A response whose last so many tokens say one thing over and over ends where it would be set aside, and counts in
    `response/repeated_fraction`."""
    temperature: float = Field(1.0, gt=0)
    """Logits are divided by it, in sampling and in every log-probability."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Tokens are drawn from the likeliest that have this share together; 1 keeps all."""
    top_k: int = Field(0, ge=0)
    """0 keeps all tokens."""
    stop: list[NotEmpty] = []
    """A response ends where one of these texts appears."""
    stop_token_ids: list[int] = []
    """Token ids that end a response, besides the tokenizer's end of sequence."""
    slots: int | None = Field(None, ge=1)
    """Rows that an engine decodes at once; by default as many as a CUDA device has room for, no more than a step has, and 64 on a CPU."""
    dtype: DType | None = None
    """Type of the engine's weights; by default the model's, which are then shared with the trainer and not copied."""
    compile: bool = True
    """Decode on a CPU by kernels compiled for it, in about a second once; by torch where there is no C compiler or the model is another
    than a Qwen2, Qwen3 or Llama. On CUDA steps are recorded as graphs, each the first time, and the memory of keys and values stays
    reserved between generations."""
    max_sequence_tokens: int | None = Field(None, ge=2)
    """Where generation ends a sequence, prompt included; by default `data.max_prompt_tokens` and `max_response_tokens` together.
    With an environment `max_response_tokens` is the limit of one turn, and this one that of all turns."""
    environment: EnvironmentConfig = EnvironmentConfig()
    """A name is short for an environment with nothing else set."""
    reflection_phrases: list[NotEmpty] = [
        "wait", "let me check", "let me verify", "double-check", "on second thought", "alternatively", "however",
    ]  # fmt: skip
    """Phrases of a response that reconsiders itself, counted in `response/reflections`, per response, as DAPO's authors watch them."""


class TrackerConfig(Section):
    """One place to which a run's metrics go beside `metrics.jsonl`."""

    short_for = {str: "name"}
    name: str
    """`tensorboard`, `wandb`, `trackio`, `mlflow`, `swanlab`, or `module:name` or `file.py:name` of your own."""
    params: dict[str, Any] = {}
    """Settings handed to it by keyword; for `wandb`, `trackio` and `swanlab`, further arguments of their `init`."""
    samples_every: int = Field(10, ge=0)
    """Every so many steps it gets a table of responses, where it takes them: the best and the worst of training, and the first of each
    held-out set that is evaluated then; 0 never."""


def default_trackers() -> list[TrackerConfig]:
    """Return TensorBoard, and wandb where it is installed and its environment says where to."""
    wandb = "WANDB_PROJECT" in os.environ and importlib.util.find_spec("wandb") is not None
    return [TrackerConfig(name="tensorboard"), *([TrackerConfig(name="wandb")] if wandb else [])]


class Config(Section):
    """A run."""

    flow: str
    """A recipe's name, a .yaml flow, `module:function` or `file.py:function`."""
    model: Path
    """A Hugging Face directory: weights, configuration and tokenizer; or a model of the hub, `ORG/NAME` or `ORG/NAME@revision`; or a
    GGUF file, whose dequantised weights are trained."""
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
    dtype: Literal["float32", "bfloat16", "float64", "auto"] = "auto"
    """Type of the weights in the forward pass; master weights and optimizer state are never less than float32. `auto` is bfloat16 on a
    CUDA device that has it, and float32 elsewhere."""
    seed: int = Field(0, ge=-(2**63), lt=2**63)
    """Seed of everything random: order of the data, sampling, shuffles."""
    output: Path = Path("runs")
    """The folder in which run folders are made."""
    name: str | None = None
    """The run folder's name; by default the flow's with date and time."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of a process; by default its share of the cores."""

    @property
    def max_sequence_tokens(self) -> int:
        """Return the most tokens of a sequence, its prompt and all that follows it."""
        both = self.data.max_prompt_tokens + self.rollout.max_response_tokens
        return self.rollout.max_sequence_tokens or both
