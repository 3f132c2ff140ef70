"""The whole configuration as typed models. Every key has a default that suits one machine; an unknown key is an error.

flow: dapo                      # a recipe, a YAML flow, or module:function
model: Qwen/Qwen2.5-0.5B        # a model of the hub, or any Hugging Face directory
data: {train: data/train.parquet, eval: {test: data/test.parquet}}
"""

import importlib.util
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from braidrl.config.data import DataConfig, RewardConfig
from braidrl.config.environment import EnvironmentConfig
from braidrl.config.section import (
    MOST_PROCESSES,
    MOST_ROWS,
    MOST_S,
    MOST_STEPS,
    MOST_TOKENS,
    ONE_OR_MORE,
    DType,
    Name,
    NotEmpty,
    Section,
)
from braidrl.config.training import EvaluationConfig, RoleConfig, TrainerConfig


class WorkersConfig(Section):
    """A number of processes, and their devices."""

    short_for = {int: "workers"}
    workers: int | None = Field(None, ge=1, le=MOST_PROCESSES)
    """Processes, each with a device of its own. The default of a pool is the configuration's `workers`; of a worker
    group 1, or as many as the role's layout needs.
    """
    kind: str | None = None
    """Kind of device, as `braid plan --devices` names it (`H100-80GB`); a run is refused where its cluster has none.

    By default any.
    """
    nodes: int | None = Field(None, ge=1, le=MOST_PROCESSES)
    """Number of nodes, with equal numbers of processes; by default as few as possible.

    Ranks are in the order of nodes.
    """


def by_group(value: Any) -> Any:
    """Return worker groups by name, where an override `actor.generate=2` has made `generate` a key of `actor`."""
    if not isinstance(value, dict):
        return value
    groups = dict[str, Any]()
    for name, group in value.items():
        if isinstance(group, dict) and "generate" in group:
            groups[f"{name}.generate"] = group["generate"]
            group = {key: part for key, part in group.items() if key != "generate"}
            if not group:
                continue
        groups[name] = group
    return groups


class StreamingConfig(Section):
    """Settings of the streaming runtime. Without staleness none of them changes the result of a run."""

    workers: Annotated[dict[str, WorkersConfig], BeforeValidator(by_group)] = {}
    """Processes by worker group: `actor.generate`, and each role that infers or trains: a number, or `workers`, `kind`
    and `nodes` (under `cluster.launcher=ray`). The default is 1, or as many as the role's layout needs. Checks and
    computations run with generation and training.
    """
    dispatch_rows: int = Field(16, ge=1, le=MOST_ROWS)
    """Maximum number of rows that a worker takes at once: a lower number balances the load better, a higher one needs
    fewer requests.
    """
    sampler: str | dict[str, str] = "first_in"
    """Order in which ready rows are given to workers: `first_in`, `whole_groups`, `token_balanced`, `shortest_first`,
    `oldest_version`, or your own `module:function` or `path/to/file.py:function`; for all stages, or by stage.
    """
    storage: str = "shared_memory"
    """Storage of payload: `shared_memory`, `file:/path` on a disk, or `redis://host:port/0`."""
    weights: Literal["end", "delayed", "rolling", "interrupt"] = "end"
    """Weight-update policy of engines. `end`: all load when a batch's generation is complete. `delayed`: the same, but
    they receive the weights in host memory while they generate. `rolling`: up to half of them drain at a time, while
    the others generate: a draining engine takes no rows, finishes most of its rows, and loads. `interrupt`: each
    immediately; its running rows continue with the new weights.
    """
    on_policy_share: float = Field(0.0, ge=0, lt=1)
    """With `trainer.max_staleness`: share of each batch that must start on the version on which the batch is trained,
    spread evenly over its updates. The batch waits for these rows; meanwhile engines start rows of the next batch. 0
    requires none.
    """
    lease_s: float = Field(600.0, gt=0, le=MOST_S)
    """Seconds without progress after which a worker's rows are given to another worker."""
    wait_s: float = Field(5.0, gt=0, le=MOST_S)
    """Seconds after which an idle worker asks for work again."""
    repairs_per_hour: int = Field(20, ge=0)
    """Number of lost workers that are replaced within an hour; the next loss ends the run, as so many have a common
    cause. Trainers count in `trainer.max_restarts`.
    """


class PoolConfig(WorkersConfig):
    """Roles that share their processes."""

    short_for = {list: "roles"}
    roles: list[str] = Field(min_length=1)
    """Names of the roles."""


class PlacementConfig(Section):
    """Placement of roles on pools of processes: a name (colocate, standalone, split), or a list of pools."""

    short_for = {str: "name", list: "pools"}
    name: str = "colocate"
    """`colocate`: one pool for all; `standalone`: one for each role; `split`: one for the roles that generate, one for
    the others.
    """
    pools: list[PoolConfig] = []
    """A list of pools in place of a name; each role is in one of them.

    `ROLE.generate` places a role's generation in another pool.
    """


class ClusterConfig(Section):
    """The processes of a run, and its Ray cluster."""

    launcher: Literal["local", "torchrun", "ray"] | None = None
    """Launcher of the ranks of `runtime: distributed` and the workers of `runtime: streaming`. `local`: this command,
    on this machine. `ray`: Ray, on its cluster. `torchrun` (ranks only): torchrun has started this command as a rank,
    and is then the default.
    """
    address: str | None = None
    """Address of a running cluster; by default RAY_ADDRESS, or a cluster on this machine that ends with the run."""
    cpus: int | None = Field(None, ge=1, le=MOST_PROCESSES)
    """CPUs of a cluster on this machine, one for each worker; by default all."""
    start_limit_s: float = Field(300.0, gt=0, le=MOST_S)
    """Seconds for workers to start and load their models."""
    silence_s: float = Field(60.0, gt=0, le=MOST_S)
    """Watchdog: seconds without a heartbeat after which a process is reported and killed; another process takes over
    its work, or the run ends. The same applies to a process without progress for this time and for ten times its
    longest recent interval between progress.
    """
    wait_limit_s: float = Field(3600.0, gt=0, le=MOST_S)
    """Seconds without a message from a worker after which the run ends."""


class ServersConfig(Section):
    """External inference servers, with `rollout.engine: http`."""

    short_for = {str: "urls", list: "urls"}
    urls: Annotated[list[str], ONE_OR_MORE] = []
    """Addresses, as in `http://127.0.0.1:8000`; a router distributes rows over them."""
    dialect: str = "vllm"
    """Type of the servers: `vllm` or `sglang`."""
    weights: Literal["folder", "network"] = "folder"
    """Transfer of weights: the servers read them from `folder`, or the run sends them over the network (vLLM; NCCL on
    CUDA, else gloo).
    """
    folder: Path | None = None
    """Folder for weights, which the servers and the run see at the same path; by default this machine's folder for
    temporary files.
    """


VLLM_SHAPE = {
    "tensor_parallel_size": "tensor",
    "pipeline_parallel_size": "pipeline",
    "data_parallel_size": "engines for copies of an engine",
    **dict.fromkeys(
        ("nnodes", "node_rank", "master_addr", "master_port", "distributed_executor_backend"),
        "nodes for one over several nodes",
    ),
}
"""Settings of vLLM that `rollout.vllm` does not take, and the key that says the same of every engine."""


class RolloutConfig(Section):
    """Sampling of responses."""

    engine: str = "embedded"
    """Inference engine: `embedded` decodes with the trainer's own weights, `vllm` runs in its own processes, `http`
    uses external servers; or your own `module:name` or `file.py:name`.
    """
    engine_settings: dict[str, Any] = {}
    """Settings of your own engine, which receives them in its spec's `options`."""
    reproducible: bool | Literal["auto"] = "auto"
    """True: a row's own random numbers draw its tokens in every engine, so that all engines draw the same ones. False:
    vLLM and servers draw by their own numbers, at full speed; the loss is corrected for what their log-probs differ
    from the trainer's. `auto`: true with the embedded engine, which cannot do otherwise, and your own; false with vLLM
    and servers.
    """
    servers: ServersConfig = ServersConfig()
    """External servers; an address or a list of addresses is short for `urls`."""
    engines: int | None = Field(None, ge=0, le=MOST_PROCESSES)
    """Number of engine processes, each with a replica of the weights; a router distributes rows over them and restarts
    one that ends. By default 1 for vLLM, and 0 for the embedded engine and your own: the process that trains also
    generates.
    """
    tensor: int = Field(1, ge=1, le=MOST_PROCESSES)
    """Tensor-parallel ranks of an engine of vLLM or a server: they shard its weights, heads and vocabulary. A number
    that divides the model's attention heads. With the embedded engine, and vLLM's with `engines` 0, so many of the
    ranks that train decode together, under `runtime: distributed` or `hybrid`; see `grouping`. With the embedded engine
    the number also divides the key/value heads.
    """
    pipeline: int = Field(1, ge=1, le=MOST_PROCESSES)
    """Pipeline-parallel ranks of an engine of vLLM or a server, each with `tensor` ranks; or of ranks that train and
    generate.
    """
    nodes: int | None = Field(None, ge=1, le=MOST_PROCESSES)
    """Nodes that each engine of vLLM spans, with equal numbers of its ranks, under `runtime: streaming`. By default as
    few as have devices for them, with `cluster.launcher: ray`; else 1.
    """
    grouping: Literal["interval", "neighbour", "gather"] | None = None
    """Groups of training ranks that generate together, and the weights that they receive. `interval`: ranks at equal
    distances; a rank's training shard is part of its generation shard, and it receives the rest (HybridFlow).
    `neighbour`: the ranks of each replica gather all weights and keep their slices (HybridFlow-V). `gather`: all ranks
    gather all weights, for `shard: full` (DeepSpeed-Chat). The default is `interval` if `pipeline` and `tensor` divide
    the training layout's, else neighbours that receive what they lack.
    """
    python: Path | None = None
    """Python interpreter of the engine processes, if vLLM is installed in another virtual environment; by default
    Braid's.
    """
    vllm: dict[str, Any] = {}
    """Further arguments of vLLM's engine, as in `{gpu_memory_utilization: 0.5}`. Its shape is `tensor`, `pipeline` and
    `engines`.
    """
    weights: str | None = None
    """Transfer of weights from training ranks to engine processes: `file` in shared memory; `collective` from device to
    device over a process group (NCCL on CUDA, where each process needs its own device; gloo on a CPU); or your own
    transport, `module:name` or `file.py:name`. The default is collective between CUDA devices, else file.
    """

    @field_validator("speculation", mode="before")
    @classmethod
    def _reads_off(cls, value: object) -> object:
        # YAML reads off as false, and on as true.
        return {False: "off", True: "auto"}[value] if isinstance(value, bool) else value

    @field_validator("weights", mode="before")
    @classmethod
    def _names_a_way(cls, value: object) -> object:
        if value == "handles":
            raise ValueError("handles are not supported any more; write collective between CUDA devices, or file")
        if isinstance(value, str) and value not in ("file", "collective") and ":" not in value:
            raise ValueError(f"{value!r} is no transfer of weights; write file, collective, or your own file.py:name")
        return value

    @property
    def is_reproducible(self) -> bool:
        """Return True where a row's own random numbers draw its tokens."""
        return self.engine not in ("vllm", "http") if self.reproducible == "auto" else self.reproducible

    @model_validator(mode="after")
    def _has_one_shape(self) -> "RolloutConfig":
        """Raises ValueError for vLLM's own word of what a key of Braid's says."""
        for name, key in VLLM_SHAPE.items():
            if self.engine == "vllm" and name in self.vllm:
                raise ValueError(f"vllm.{name} is set for each engine; remove it, and write rollout.{key}")
        return self

    max_log_prob_gap: float = Field(0.2, gt=0)
    """The run ends if log-probs of engine and trainer differ by more than this on average, in nats per token."""
    samples_per_prompt: int = Field(8, ge=1, le=MOST_ROWS)
    """Rows in a group."""
    max_response_tokens: int = Field(512, ge=1, le=MOST_TOKENS)
    """Maximum length of a response."""
    tokens_per_iteration: int | None = Field(None, ge=1, le=MOST_TOKENS)
    """Partial rollout: a response with so many tokens in one iteration is suspended and resumes in the next one with
    its weights, so that no iteration waits for the longest response. Under `streaming` an iteration lasts until the
    response's batch is complete. Needs `trainer.max_staleness`, which bounds the age of the oldest token, and
    `trainer.surplus=keep`.
    """
    repeated_tokens: int | None = Field(None, ge=4, le=MOST_TOKENS)
    """A response whose last so many tokens repeat one phrase ends when it would be suspended
    (`response/repeated_fraction`).
    """
    temperature: float = Field(1.0, ge=1e-4, le=1e4)
    """Divides the logits, in sampling and in every log-probability."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Cumulative probability of the tokens to sample from; 1 keeps all."""
    top_k: int = Field(0, ge=0, le=MOST_ROWS)
    """Number of likeliest tokens to sample from; 0 keeps all."""
    stop: list[Annotated[NotEmpty, Field(max_length=1024)]] = Field([], max_length=64)
    """A response ends at the first of these texts."""
    stop_token_ids: list[int] = []
    """Token ids that end a response, in addition to the tokenizer's end of sequence."""
    slots: Annotated[int, Field(ge=1, le=MOST_PROCESSES)] | Literal["auto"] | None = None
    """Rows that an engine decodes at once. The default is as many as a CUDA device has memory for, at most those of a
    step; 64 on a CPU. `auto`: those of a step; of them vLLM begins as many as its keys and values have room for, by the
    lengths of recent rows, so that it preempts none. With the embedded engine as many as there is memory for, also on a
    CPU.
    """
    dtype: DType | None = None
    """Dtype of the engine's weights; by default the model's, and the weights are then shared with the trainer and not
    copied.
    """
    shared_base: bool = False
    """Policies that play together (`policies` of a generate stage), each trained with `lora` on one model, draw with
    one embedded engine: a step has rows of all of them, and the frozen weights of their trainers and of the engine
    exist once in a process. Their tokens are those of separate engines, up to rounding. Under streaming adapters alone
    are sent to engines. vLLM in processes of its own (not under streaming) gets adapters for each policy too.
    """
    compile: bool = True
    """On a CPU: decode with compiled C kernels (compiled once, in about a second); torch decodes without a C compiler,
    or if the model is not a Qwen2, Qwen3 or Llama. On CUDA: decode Qwen2, Qwen3 and Llama with Triton kernels, record
    decode steps as CUDA graphs, and keep the KV cache reserved between generations.
    """
    speculation: Literal["auto", "off"] = "auto"
    """Exact speculation of the embedded engine's compiled kernels (`compile`, on a CPU). Next tokens are guessed from
    the row, its group and the prompt's responses in earlier epochs. One pass of the model checks several guesses, and a
    guess is accepted exactly if the row draws that token, so that no result changes. `auto`: the number of guesses that
    brings the most tokens per second, none while they bring nothing. Other models and devices decode without guesses.
    """
    max_sequence_tokens: int | None = Field(None, ge=2, le=MOST_TOKENS)
    """Maximum length of a sequence, prompt included; by default `data.max_prompt_tokens` plus `max_response_tokens`.
    With an environment `max_response_tokens` limits one turn, and this limits all turns together.
    """
    environment: EnvironmentConfig = EnvironmentConfig()
    """Environment of multi-turn trajectories; a name is short for `{name: ...}`."""
    reflection_phrases: list[NotEmpty] = [
        "wait",
        "let me check",
        "let me verify",
        "double-check",
        "on second thought",
        "alternatively",
        "however",
    ]
    """Phrases that show reflection, counted per response in `response/reflections`, as in the DAPO paper."""


class TrackerConfig(Section):
    """A tracker that receives a run's metrics, in addition to `metrics.jsonl`."""

    short_for = {str: "name"}
    name: str
    """`tensorboard`, `wandb`, `trackio`, `mlflow`, `swanlab`, or your own `module:name` or `file.py:name`."""
    params: dict[str, Any] = {}
    """Keyword arguments for it; for `wandb`, `trackio` and `swanlab`, further arguments of their `init`."""
    samples_every: int = Field(10, ge=0, le=MOST_STEPS)
    """Steps between tables of responses, for trackers that support tables: the best and the worst of training, and the
    first of each held-out set evaluated at that step; 0 never.
    """


def default_trackers() -> list[TrackerConfig]:
    """Return TensorBoard, and wandb if it is installed and WANDB_PROJECT is set."""
    wandb = "WANDB_PROJECT" in os.environ and importlib.util.find_spec("wandb") is not None
    return [TrackerConfig(name="tensorboard"), *([TrackerConfig(name="wandb")] if wandb else [])]


class Config(Section):
    """The configuration of a run."""

    flow: str
    """A recipe's name, a .yaml flow, `module:function` or `file.py:function`."""
    model: Path
    """A Hugging Face directory: weights, configuration and tokenizer; or a model of the hub, `ORG/NAME` or
    `ORG/NAME@revision`.
    """
    algorithm: dict[str, Any] = {}
    """Settings of the recipe, such as `clip_high`."""
    data: DataConfig = DataConfig()
    """Sources of prompts."""
    reward: RewardConfig = RewardConfig()
    """Verification of answers."""
    rollout: RolloutConfig = RolloutConfig()
    """Sampling of responses."""
    trainer: TrainerConfig = TrainerConfig()
    """Number of steps, batch sizes, optimizer and checkpoints."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Evaluation on held-out sets."""
    roles: dict[str, RoleConfig] = {}
    """Settings of single roles by name, as in `roles.critic.learning_rate=1e-5`."""
    trackers: Annotated[list[TrackerConfig], ONE_OR_MORE] = Field(default_factory=default_trackers)
    """Trackers in addition to `metrics.jsonl`; the default is TensorBoard, and `wandb` if it is installed and
    WANDB_PROJECT is set.
    """
    runtime: Literal["eager", "hybrid", "distributed", "streaming"] = "eager"
    """Execution mode: `eager` (single process), `hybrid` (Ray controller), `distributed` (SPMD), `streaming`
    (asynchronous).
    """
    placement: PlacementConfig = PlacementConfig()
    """Placement of roles on pools: `colocate`, `standalone`, `split`, or lists of roles as in `[[actor, reference],
    [critic]]`.
    """
    workers: int = Field(1, ge=1, le=MOST_PROCESSES)
    """Processes of each pool whose placement gives no number; number of ranks of `runtime: distributed`."""
    cluster: ClusterConfig = ClusterConfig()
    """Launcher, Ray cluster, and time limits for workers."""
    streaming: StreamingConfig = StreamingConfig()
    """Worker groups, queue and weights of `runtime: streaming`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; `auto` is CUDA if available."""
    dtype: Literal["float32", "bfloat16", "float64", "auto"] = "auto"
    """Dtype of the weights in the forward pass; master weights and optimizer state have at least float32. `auto` is
    bfloat16 on a CUDA device that supports it, and float32 elsewhere.
    """
    seed: int = Field(0, ge=-(2**63), lt=2**63)
    """Seed of all random numbers: order of the data, sampling, shuffles."""
    output: Path = Path("runs")
    """Folder for run folders."""
    name: Name | None = None
    """The run folder's name; by default the flow's with date and time."""
    threads: int | None = Field(None, ge=1, le=MOST_PROCESSES)
    """CPU threads of a process; by default its share of the cores."""

    @property
    def max_sequence_tokens(self) -> int:
        """Return the maximum length of a sequence in tokens, prompt included."""
        both = self.data.max_prompt_tokens + self.rollout.max_response_tokens
        return self.rollout.max_sequence_tokens or both
