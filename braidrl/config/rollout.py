"""How responses are sampled, and what trajectories of several turns are played in."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from braidrl.algorithms.metrics import REFLECTION_PHRASES
from braidrl.config.section import ONE_OR_MORE, DType, Section


class EnvironmentConfig(Section):
    """What trajectories of several turns are played in."""

    short_for = {str: "name"}
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
    check_weights: bool = False
    """Have each of those processes, or servers that are sent weights, compare a checksum of what it is given."""
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
    """Token ids that end a response, besides the tokenizer's end of sequence."""
    slots: int = Field(64, ge=1)
    """Rows that the embedded engine decodes at once."""
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
    reflection_phrases: list[str] = list(REFLECTION_PHRASES)
    """Phrases of a response that reconsiders itself, counted in `response/reflections`, per response."""
