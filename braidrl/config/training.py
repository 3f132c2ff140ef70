"""How long, how much at once, with which optimizer and layout, and how held-out sets are measured."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from braidrl.config.layout import ParallelLayout
from braidrl.config.section import MOST_PROCESSES, MOST_ROWS, MOST_STEPS, MOST_TOKENS, DType, Section

MOST_LEARNING_RATE = 100.0
Decay = Annotated[float, Field(ge=0, lt=1)]


class LoraConfig(Section):
    """Low-rank adapters, trained in place of the weights themselves."""

    rank: int = Field(16, ge=1, le=MOST_ROWS)
    """Width of an adapter."""
    alpha: float = Field(32.0, gt=0, le=1e6)
    """What an adapter adds to a layer is scaled by alpha / rank."""
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Linear layers that get one, by the last part of their name; by default all within the decoder's layers."""
    base_dtype: Literal["nf4"] | None = None
    """`nf4` keeps the weights under the adapters in 4 bits (QLoRA, needs bitsandbytes), and engines of the same process generate with
    them; by default they have the model's type."""


class TrainerConfig(Section):
    """How long, how much at once, and the optimizer."""

    steps: int = Field(100, ge=0, le=MOST_STEPS)
    """Iterations."""
    prompts_per_step: int = Field(32, ge=1, le=MOST_ROWS)
    """Groups in a batch, after selection."""
    rows_per_update: int | None = Field(None, ge=1, le=MOST_ROWS)
    """Rows of one optimizer step; by default the whole batch."""
    epochs: int = Field(1, ge=1, le=MOST_ROWS)
    """Passes over a batch."""
    max_tokens_per_device: int | None = Field(None, ge=1, le=MOST_TOKENS)
    """Tokens of a micro-batch; the only dial for memory, without effect on the result. By default as many as a CUDA device has room for,
    and 8192 on a CPU."""
    backend: str = "torch"
    """What trains and infers: `torch`, which has layouts, adapters and offloading, or `module:name` or `file.py:name` of your own."""
    optimizer: str = "adamw"
    """`adamw`, `adamw8bit` (its moments in 8 bits, needs bitsandbytes), `sgd`, or `module:name` or `file.py:name` of your own; torch's
    have names too, as in `torch.optim:RMSprop`."""
    optimizer_settings: dict[str, Any] = {}
    """Settings handed to it by keyword, as in `{momentum: 0.9}`."""
    learning_rate: float = Field(1e-6, ge=0, le=MOST_LEARNING_RATE)
    """Of the optimizer, after warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the learning rate does after its warm-up, over `steps`."""
    warmup_steps: int = Field(0, ge=0, le=MOST_STEPS)
    """Iterations over which the learning rate rises from 0."""
    weight_decay: float = Field(0.0, ge=0, le=100)
    """AdamW's decoupled weight decay."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """AdamW's decay rates of the two moments."""
    epsilon: float = Field(1e-8, gt=0, le=1)
    """AdamW's epsilon, added to the root of the second moment."""
    max_grad_norm: float | None = Field(1.0, gt=0, le=1e30)
    """A longer gradient is scaled down to this norm; none does not clip."""
    skip_bad_updates: bool = False
    """Leave out an optimizer step whose loss or gradient is NaN or infinite, and count it; by default the run ends there."""
    max_skipped_updates: int = Field(10, ge=0, le=MOST_STEPS)
    """With `skip_bad_updates`, the run ends after so many optimizer steps of a role in a row that were left out; 0 never."""
    share_prompts: bool = False
    """Rows of a group put their prompt through the model once, in inference and training, where that makes a quarter of the tokens go
    away. Log-probs and gradients are the same up to rounding."""
    compile: bool = True
    """Norms and gated activations on a CPU by kernels compiled for it, in about a second once; by torch where there is no C compiler. On
    CUDA these, rotary embeddings and log-probs by Triton kernels: liger-kernel's where it is installed, else those of torch.compile."""
    layout: ParallelLayout = ParallelLayout()
    """How each role lies on the devices of `runtime: distributed`, or on those of its pool under `hybrid`; by default each has a copy
    of the model."""
    inference_layout: ParallelLayout | None = None
    """The layout in which trained roles compute log-probs, values and scores, with a copy of their weights that is brought up to date
    whenever these have changed; by default the one in which they train."""
    lora: LoraConfig | None = None
    """Train low-rank adapters of each trained role in place of its weights; `{}` takes the defaults. They want about ten times the
    learning rate."""
    resident_gib: float | None = Field(None, gt=0, le=1 << 20)
    """GiB of its device that weights, optimizers, gradients, keys and values of all roles of a process may take together. What a stage
    does not need and has no room beside it waits in pinned host memory, on a CPU in a file in TMPDIR. By default everything stays."""
    activation_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, about a third more time."""
    checkpoint_every: int = Field(50, ge=0, le=MOST_STEPS)
    """Iterations between checkpoints; 0 keeps only the one at the end."""
    checkpoint_async: bool = False
    """Write a checkpoint while the next steps are made, from a copy in host memory; an error ends the run at the next step, and
    Ctrl-C and the end of the run wait for it."""
    keep_checkpoints: int = Field(2, ge=1, le=MOST_ROWS)
    """The last so many stay, older ones are removed."""
    accept_changes: list[Literal["model", "tokenizer", "template", "data", "code"]] = []
    """What may have changed since the checkpoint from which a run resumes. Otherwise the run ends where its model, tokenizer, template,
    training data or your own code is another than it was. Holds for one resume."""
    max_restarts: int = Field(0, ge=0, le=MOST_ROWS)
    """How often a run starts again by itself from its newest whole checkpoint, when a process is lost that it cannot go on without: a
    rank, a trainer, a worker of hybrid. Under streaming only those that train are started again, and rows in the queue stay where that
    checkpoint is of the last published version; under hybrid only the worker's pool. What fails with an error of its own is not tried
    again."""
    deterministic: bool = False
    """Only deterministic kernels, so that a resumed run repeats the uninterrupted one to the bit."""
    surplus: Literal["drop", "keep"] = "drop"
    """What happens to selected groups that a batch has no room for."""
    over_sampling: float = Field(1.0, ge=1, le=1000)
    """How many times the groups of a batch are begun at once, where the flow selects: it waits less for refills. What it turns out not
    to need is given up, and never a group for one with a higher number."""
    max_staleness: int = Field(0, ge=0, le=MOST_ROWS)
    """By how many versions a row may lag behind the weights it trains (streaming)."""


class EvaluationConfig(Section):
    """A second flow (generate, verify) with its own random numbers."""

    every: int = Field(10, ge=0, le=MOST_STEPS)
    """Iterations between evaluations; 0 never."""
    before_first_step: bool = True
    """Evaluate the untrained model too."""
    samples: int = Field(8, ge=1, le=MOST_ROWS)
    """Responses per prompt: the k of avg@k; pass@ is reported for every power of two up to it."""
    temperature: float = Field(1.0, ge=0)
    """0 takes the likeliest token."""
    top_p: float = Field(0.7, gt=0, le=1)
    """As `rollout.top_p`, for evaluation."""
    top_k: int = Field(0, ge=0, le=MOST_ROWS)
    """As `rollout.top_k`, for evaluation."""
    max_prompts: int | None = Field(None, ge=1, le=MOST_ROWS)
    """The first so many prompts of each set; all by default."""
    stop_at: float | None = Field(None, gt=0, le=1)
    """The run ends, before `trainer.steps`, when an evaluation finds avg@k (or pair accuracy) of every set at least this high."""


class RoleConfig(Section):
    """Settings of one role that differ from the run's."""

    model: Path | None = None
    """A model of its own; by default the run's. One that only scores may have a tokenizer of its own: it reads the same texts."""
    backend: str | None = None
    """By default the trainer's."""
    learning_rate: float | None = Field(None, ge=0, le=MOST_LEARNING_RATE)
    """By default the trainer's."""
    dtype: DType | None = None
    """By default the run's."""
    layout: ParallelLayout | None = None
    """By default the trainer's."""
    inference_layout: ParallelLayout | None = None
    """By default the trainer's; of a trained role."""
    lora: LoraConfig | None = None
    """By default the trainer's."""
    max_tokens_per_device: int | None = Field(None, ge=1, le=MOST_TOKENS)
    """By default the trainer's."""
    activation_checkpointing: bool | None = None
    """By default the trainer's."""
    methods: str | None = None
    """A class of your own methods for this role's workers, `module:Class` or `file.py:Class`, that a session calls under
    `runtime: hybrid`."""
    generate_workers: int | None = Field(None, ge=1, le=MOST_PROCESSES)
    """Ranks that generate for this role under `runtime: distributed`, from the first on; by default all."""
