"""Configuration of training, evaluation and roles."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from braidrl.config.layout import ParallelLayout
from braidrl.config.section import MOST_ROWS, MOST_STEPS, MOST_TOKENS, DType, Section
from braidrl.parsing import JSON_BYTES, parse_json, read_bytes

MOST_LEARNING_RATE = 100.0
Decay = Annotated[float, Field(ge=0, lt=1)]


UNREAD = {
    "use_rslora": False,
    "use_dora": False,
    "fan_in_fan_out": False,
    "bias": "none",
    "rank_pattern": {},
    "alpha_pattern": {},
    "layers_to_transform": None,
    "layers_pattern": None,
    "exclude_modules": None,
    "lora_bias": False,
}
"""Settings of peft's adapters that Braid's lack, with the only values that it reads."""


def read_adapter(folder: Path) -> dict[str, Any]:
    """Return rank, alpha and targets of adapters in peft's format. Raises ValueError, naming the file and the setting,
    for adapters that Braid's cannot be.
    """
    path = folder.expanduser() / "adapter_config.json"
    if not path.is_file():
        raise ValueError(f"{path} is missing; name a folder of adapters in peft's format")
    try:
        saved = dict(parse_json(read_bytes(path, JSON_BYTES)))
        settings = {"rank": int(saved["r"]), "alpha": float(saved["lora_alpha"]), "targets": saved["target_modules"]}
        stacks = [str(target) for target in saved.get("target_parameters") or ()]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} has no readable r, lora_alpha and target_modules ({error})") from error
    for name, value in UNREAD.items():
        if saved.get(name, value) not in (value, None):
            raise ValueError(f"{path}: {name}={saved[name]!r} is not supported; merge the adapter into the model")
    if not isinstance(settings["targets"], list):
        raise ValueError(f"{path}: target_modules is a pattern; write the list of layers there, as in [q_proj, v_proj]")
    targets = {str(target).rpartition(".")[2] for target in settings["targets"]}
    # Experts by the last two parts of their name.
    targets |= {".".join(target.split(".")[-2:]) for target in stacks}
    return {**settings, "targets": tuple(sorted(targets))}


class BalanceConfig(Section):
    """Balance of the experts of a mixture; with any value, `{}` too, metrics show each layer's load."""

    auxiliary: float = Field(0.0, ge=0, le=1e3)
    """Coefficient of the auxiliary loss: the number of experts times the sum over experts of their share of the choices
    and their mean score in a row. A balanced layer has 1.
    """
    z: float = Field(0.0, ge=0, le=1e3)
    """Coefficient of the z-loss: the square of the log-sum-exp of the router's logits."""
    bias: float = Field(0.0, ge=0, le=1)
    """Step of the selection bias after each update: up for experts below the mean load, down for those above it. For
    models with such a bias (DeepSeek-V3).
    """
    frozen: bool = False
    """Keep the routers as they are; excludes the other keys."""
    shares: Literal["row", "batch"] = "row"
    """Over which tokens the auxiliary loss counts an expert's share of the choices: those of the row, or those of the
    whole batch of the last optimizer step.
    """
    routing_gap: bool = False
    """With `replay=inference` also compute log-probs without a replay, and report the gap that routing alone causes, in
    all layers and in each.
    """

    @model_validator(mode="after")
    def _check(self) -> "BalanceConfig":
        if self.frozen and (self.auxiliary or self.z or self.bias):
            raise ValueError("frozen=true keeps the routers as they are; remove it, or auxiliary, z and bias")
        return self


class LoraConfig(Section):
    """Low-rank adapters, trained in place of the full weights."""

    adapter: Path | None = None
    """A folder of adapters in peft's format from which training starts, as `adapter/` of a role's checkpoint; rank,
    alpha and targets are then the folder's.
    """

    rank: int = Field(16, ge=1, le=MOST_ROWS)
    """Rank of an adapter."""
    alpha: float = Field(32.0, gt=0, le=1e6)
    """Scale: an adapter's output is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Linear layers with an adapter, by the last part of their name, by default all in the decoder's layers; and
    stacked matrices of experts, by the last two, as `experts.gate_up_proj` and `experts.down_proj`.
    """
    vision_targets: tuple[str, ...] = ()
    """Linear layers of the vision tower with an adapter too, likewise, as in `[qkv, proj]`; by default the tower is
    frozen.
    """
    base_dtype: Literal["nf4"] | None = None
    """`nf4` keeps the base weights in 4 bits (QLoRA, needs bitsandbytes), also for engines in the same process; by
    default as the model.
    """

    @property
    def linear_targets(self) -> tuple[str, ...]:
        return tuple(target for target in self.targets if "." not in target)

    @property
    def expert_targets(self) -> tuple[str, ...]:
        return tuple(target for target in self.targets if "." in target)

    @model_validator(mode="before")
    @classmethod
    def _of_adapter(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not values.get("adapter"):
            return values
        if values.get("vision_targets"):
            raise ValueError("adapter starts from adapters of only the text part; remove vision_targets")
        of_file = read_adapter(Path(values["adapter"]))
        for key, value in of_file.items():
            configured = values.get(key, value)
            if (sorted(configured) if key == "targets" and not isinstance(configured, str) else configured) != (
                sorted(value) if key == "targets" else value
            ):
                raise ValueError(f"{key}={configured} is not that of {values['adapter']}, {value}; remove it")
        return {**of_file, **values}


class TrainerConfig(Section):
    """Number of steps, batch sizes, optimizer, layout and checkpoints."""

    steps: int = Field(100, ge=0, le=MOST_STEPS)
    """Number of iterations."""
    prompts_per_step: int = Field(32, ge=1, le=MOST_ROWS)
    """Groups in a batch, after selection."""
    rows_per_update: int | None = Field(None, ge=1, le=MOST_ROWS)
    """Rows of one optimizer step; by default the whole batch."""
    epochs: int = Field(1, ge=1, le=MOST_ROWS)
    """Passes over a batch."""
    max_tokens_per_device: int | None = Field(None, ge=1, le=MOST_TOKENS)
    """Maximum number of tokens of a micro-batch: the setting for memory; it does not change the result. The default is
    as many as a CUDA device has memory for, and 8192 on a CPU.
    """
    backend: str = "torch"
    """Training backend: `torch`, which supports layouts, adapters and offloading, or your own `module:name` or
    `file.py:name`.
    """
    optimizer: str = "adamw"
    """`adamw`, `adamw8bit` (needs bitsandbytes), `sgd`, your own `module:name` or `file.py:name`, or torch's, as
    `torch.optim:RMSprop`.
    """
    optimizer_settings: dict[str, Any] = {}
    """Keyword arguments for it, as in `{momentum: 0.9}`."""
    learning_rate: float = Field(1e-6, ge=0, le=MOST_LEARNING_RATE)
    """Learning rate after warm-up."""
    train_vision: bool = False
    """Train the vision tower of a model that sees too; by default it is frozen, and its encoded images are kept."""
    vision_learning_rate: float | None = Field(None, gt=0, le=MOST_LEARNING_RATE)
    """Learning rate of the vision tower after warm-up, with `train_vision`; by default that of the text part."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule of the learning rate after warm-up, over `steps`."""
    warmup_steps: int = Field(0, ge=0, le=MOST_STEPS)
    """Iterations over which the learning rate rises from 0."""
    weight_decay: float = Field(0.0, ge=0, le=100)
    """AdamW's decoupled weight decay."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """AdamW's decay rates of the two moments."""
    epsilon: float = Field(1e-8, gt=0, le=1)
    """AdamW's epsilon, added to the root of the second moment."""
    max_grad_norm: float | None = Field(1.0, gt=0, le=1e30)
    """Gradient clipping: maximum norm of a gradient; null disables it."""
    skip_bad_updates: bool = False
    """Skip and count an optimizer step with a NaN or infinite loss or gradient; by default the run ends there."""
    max_skipped_updates: int = Field(10, ge=0, le=MOST_STEPS)
    """With `skip_bad_updates`: number of consecutive skipped optimizer steps of a role that ends the run; 0 never ends
    it.
    """
    share_prompts: bool = False
    """Compute a group's prompt once for all its rows if this saves a quarter of the tokens, or a twentieth where
    attention is compiled (`compile`, on a CPU); results are the same up to rounding.
    """
    compile: bool = True
    """On a CPU: compiled C kernels for norms, gated activations and rotary embeddings (compiled once, in about a
    second); torch's if there is no C compiler. On CUDA: Triton kernels for these and log-probs, from liger-kernel if
    installed, else from torch.compile.
    """
    layout: ParallelLayout = ParallelLayout()
    """Layout of each role on the devices of `runtime: distributed`, or of its pool under `hybrid`; by default each
    holds a replica.
    """
    inference_layout: ParallelLayout | None = None
    """Layout of trained roles for log-probs, values and scores, with a second copy of their weights; by default the
    training layout.
    """
    lora: LoraConfig | None = None
    """Train low-rank adapters in place of each trained role's weights; `{}` takes the defaults. They need about ten
    times the rate.
    """
    balance: BalanceConfig | None = None
    """Balance of the experts of trained roles' mixtures, and its metrics; by default routers train as other weights."""
    resident_gib: float | None = Field(None, gt=0, le=1 << 20)
    """Offloading: GiB of its device for weights, optimizers, gradients and KV caches of all roles of a process
    together. Parts that a stage does not need wait in pinned host memory, or on a CPU in a file in TMPDIR. By default
    nothing is offloaded.
    """
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    checkpoint_every: int = Field(50, ge=0, le=MOST_STEPS)
    """Iterations between checkpoints; 0 writes only the last one."""
    checkpoint_async: bool = False
    """Write checkpoints in the background, from a copy in host memory.

    An error ends the run at the next step; its end waits for it.
    """
    keep_checkpoints: int = Field(2, ge=1, le=MOST_ROWS)
    """Number of latest checkpoints to keep; older ones are removed."""
    accept_changes: list[Literal["model", "tokenizer", "template", "data", "code"]] = []
    """Inputs that may differ from those of the checkpoint when a run resumes. By default a changed model, tokenizer,
    template, training data or user code ends the run. Valid for one resume.
    """
    max_restarts: int = Field(0, ge=0, le=MOST_ROWS)
    """Number of automatic restarts within an hour after the loss of an essential process: a rank, a trainer, or a
    worker under hybrid. Under distributed and streaming the other ranks continue from copies in their memory, and the
    lost one comes back. If a part of the state is on no rank, the newest whole checkpoint is loaded: under streaming
    only by trainers, and rows in the queue stay if it has the last published version; under hybrid the worker's pool
    restarts. A process that fails with its own error is not restarted.
    """
    deterministic: bool = False
    """Use only deterministic kernels, so that a resumed run repeats the uninterrupted one to the bit."""
    surplus: Literal["drop", "keep"] = "drop"
    """Treatment of kept groups beyond the batch: `drop` them, or `keep` them for the next batch."""
    over_sampling: float = Field(1.0, ge=1, le=1000)
    """Size of a batch's first wave of groups relative to the batch, for flows with `select`: it reduces waiting for
    refills. Groups that are not needed are aborted, always those with the highest numbers.
    """
    max_staleness: int = Field(0, ge=0, le=MOST_ROWS)
    """Maximum number of versions by which a row may lag behind the weights that it trains (streaming)."""

    @model_validator(mode="after")
    def _rate_of_vision(self) -> "TrainerConfig":
        if self.vision_learning_rate is not None and not (self.train_vision and self.learning_rate):
            raise ValueError("vision_learning_rate needs train_vision=true and a learning_rate above 0")
        return self


class EvaluationConfig(Section):
    """Evaluation: a second flow (generate, verify) with its own random numbers."""

    every: int = Field(10, ge=0, le=MOST_STEPS)
    """Iterations between evaluations; 0 never."""
    before_first_step: bool = True
    """Also evaluate the untrained model."""
    samples: int = Field(8, ge=1, le=MOST_ROWS)
    """Responses per prompt: the k of avg@k; pass@ is reported for every power of two up to it."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    top_p: float = Field(0.7, gt=0, le=1)
    """As `rollout.top_p`, for evaluation."""
    top_k: int = Field(0, ge=0, le=MOST_ROWS)
    """As `rollout.top_k`, for evaluation."""
    max_prompts: int | None = Field(None, ge=1, le=MOST_ROWS)
    """Number of prompts of each set, from the first; by default all."""
    responses: Literal["auto", "generated", "given"] = "auto"
    """For flows on given responses, as sft and dpo: `given` evaluates those of the held-out sets, by `loss` or
    `pair_accuracy`; `generated` generates responses and verifies them. The default is given, unless a verifier other
    than `exact` is named.
    """
    best: str | None = None
    """Metric of an evaluation set, as `eval/test/avg@8`: the checkpoint of the step at which it was highest is kept
    beside the latest ones, and `braid export RUN FOLDER --best` copies its model. By default none is.
    """
    stop_at: float | None = Field(None, gt=0, le=1)
    """Early stopping: the run ends when avg@k (or pair accuracy) of every set is at least this."""


class RoleConfig(Section):
    """Settings of one role that differ from the run's."""

    model: Path | None = None
    """The role's own model; by default the run's.

    A role that only scores may have another tokenizer: it reads the same texts.
    """
    backend: str | None = None
    """The default is the trainer's."""
    learning_rate: float | None = Field(None, ge=0, le=MOST_LEARNING_RATE)
    """The default is the trainer's."""
    dtype: DType | None = None
    """The default is the run's."""
    layout: ParallelLayout | None = None
    """The default is the trainer's."""
    inference_layout: ParallelLayout | None = None
    """The default is the trainer's; for trained roles only."""
    lora: LoraConfig | None = None
    """The default is the trainer's."""
    max_tokens_per_device: int | None = Field(None, ge=1, le=MOST_TOKENS)
    """The default is the trainer's."""
    activation_checkpointing: bool | None = None
    """The default is the trainer's."""
    methods: str | None = None
    """Class with your own methods for this role's workers, `module:Class` or `file.py:Class`, for a session under
    `runtime: hybrid`.
    """
