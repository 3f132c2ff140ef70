"""The optimizer on master weights of at least float32, with gradient sums per denominator that are divided once.

loss sums ──backward──▶ gradient sums per denominator ──step: / global count, clip──▶ master weights ──▶ model weights

Each rank holds gradient, master and moments of its shard of a parameter. `trainer.optimizer` selects the optimizer:
a function of the masters by name, whole parameters or DTensors of sharded ones.
`braidrl.training.optimizer_contract` holds the checks that it must pass.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from braidrl.config import TrainerConfig
from braidrl.errors import UserError
from braidrl.training.lora import import_optional
from braidrl.training.names import OPTIMIZERS
from braidrl.training.parallel.layouts import DataParallel
from braidrl.weights.checkpoint_files import block_in
from braidrl.weights.shards import as_dtensor, local_shard

MASTER_BYTES = 4
NamedParameters = Sequence[tuple[str, Tensor]]
"""A model's parameters by name; those of a sharded model are DTensors."""
BLOCK = 256
"""Codes of 8-bit moments that share a scale."""
MOMENT_BYTES = {"adamw": float(MASTER_BYTES), "adamw8bit": 1 + torch.float32.itemsize / BLOCK}
"""Bytes of each of a weight's two moments, for optimizers that take AdamW's keys."""
UNDIVIDED = ("absmax1", "absmax2", "qmap1", "qmap2")
"""State of 8-bit moments that does not have its parameter's shape: scales and code tables."""


def moment_bytes(config: TrainerConfig) -> float:
    """Return the bytes of each of a float32 weight's moments; other optimizers are assumed to keep two in float32."""
    return MOMENT_BYTES.get(config.optimizer, MASTER_BYTES)


def local_shards(parameters: NamedParameters) -> list[tuple[str, Tensor]]:
    """Return each parameter's local shard: enough for an optimizer that computes element by element."""
    return [(name, local_shard(parameter)) for name, parameter in parameters]


def adamw(parameters: NamedParameters, lr: float, **settings: Any) -> torch.optim.Optimizer:
    """Return torch's AdamW in one fused pass over all tensors."""
    return torch.optim.AdamW(local_shards(parameters), lr=lr, fused=True, **settings)


def sgd(parameters: NamedParameters, lr: float, **settings: Any) -> torch.optim.Optimizer:
    """Return torch's SGD, which has no state without momentum."""
    return torch.optim.SGD(local_shards(parameters), lr=lr, fused=True, **settings)


def adamw8bit(parameters: NamedParameters, lr: float, **settings: Any) -> torch.optim.Optimizer:
    """Return AdamW with 8-bit moments by bitsandbytes. Raises UserError if it is not installed.

    Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization". Parameters of fewer than 4,096 numbers keep
    moments in float32.
    """
    base: Any = import_optional("bitsandbytes", "trainer.optimizer=adamw8bit", "bits").optim.AdamW8bit

    class AdamW8bit(base):
        """AdamW8bit with step counts as tensors, as in torch's optimizers, so that checkpoints contain them."""

        def init_state(self, group: Any, p: Tensor, gindex: int, pindex: int) -> None:
            super().init_state(group, p, gindex, pindex)
            # Clone: safetensors files cannot store shared tensors.
            state = self.state[p]
            state.update({name: state[name].clone() for name in UNDIVIDED if name in state})

        def update_step(self, group: Any, p: Tensor, gindex: int, pindex: int) -> None:
            state = self.state[p]
            state["step"] = int(state["step"])
            super().update_step(group, p, gindex, pindex)
            state["step"] = torch.tensor(float(state["step"]))

    return AdamW8bit(local_shards(parameters), lr=lr, **settings)


def optimizer_settings(config: TrainerConfig) -> dict[str, Any]:
    """Return the settings of the configured optimizer by keyword; AdamW has separate keys for some."""
    adamw_settings = {"betas": config.betas, "eps": config.epsilon, "weight_decay": config.weight_decay}
    return {**(adamw_settings if config.optimizer in MOMENT_BYTES else {}), **config.optimizer_settings}


def check_optimizer(config: TrainerConfig) -> None:
    """Raise UserError for an unknown optimizer, unknown settings, or an optimizer that skips a parameter."""
    OPTIMIZERS.check(config.optimizer)
    if config.optimizer not in MOMENT_BYTES:
        OPTIMIZERS.check_settings(config.optimizer, config.optimizer_settings)
        for key in ("weight_decay", "betas", "epsilon"):
            if getattr(config, key) != TrainerConfig.model_fields[key].default:
                raise UserError(
                    f"trainer.{key} is AdamW's, and trainer.optimizer is {config.optimizer}; remove it, or write what "
                    "that one has in trainer.optimizer_settings"
                )
    named = [("model.embed_tokens.weight", torch.zeros(2, 2)), ("model.layers.0.mlp.up_proj.weight", torch.zeros(2, 2))]
    named += [("model.layers.0.experts.up_proj", torch.zeros(2, 2, 2)), ("model.norm.weight", torch.zeros(2))]
    try:
        trained_tensors(make_optimizer(named, config, config.learning_rate), [name for name, _ in named], config)
    except (TypeError, ValueError) as error:
        raise UserError(f"trainer.optimizer={config.optimizer}: {' '.join(str(error).split())}") from error


def make_optimizer(
    parameters: NamedParameters, config: TrainerConfig, lr: float, rates: Mapping[str, float] | None = None
) -> torch.optim.Optimizer:
    """Return the configured optimizer of these parameters; `rates` are rates other than `lr`, by name."""
    by_rate: dict[float, list[tuple[str, Tensor]]] = {}
    for name, parameter in parameters:
        by_rate.setdefault((rates or {}).get(name, lr), []).append((name, parameter))
    kind, settings = OPTIMIZERS.find(config.optimizer), optimizer_settings(config)
    optimizer: torch.optim.Optimizer
    optimizer, *further = [kind(by_name, lr=rate, **settings) for rate, by_name in (by_rate or {lr: []}).items()]
    for group in (group for additional in further for group in additional.param_groups):
        optimizer.add_param_group(group)
    return optimizer


def trained_tensors(optimizer: torch.optim.Optimizer, names: Sequence[str], config: TrainerConfig) -> list[Tensor]:
    """Return the tensors that an optimizer updates, in the order of `names`: those passed to it, or their local shards.

    Raises UserError if it lacks one.
    """
    tensors = {
        name: tensor
        for group in optimizer.param_groups
        for name, tensor in zip(group.get("param_names", ()), group["params"], strict=False)
    }
    if lacking := [name for name in names if name not in tensors]:
        raise UserError(
            f"trainer.optimizer={config.optimizer} does not train {lacking[0]}; pass every pair (name, tensor) that it "
            "is given to torch.optim.Optimizer, in one group or another"
        )
    return [tensors[name] for name in names]


@dataclass(frozen=True)
class StepOverrides:
    """Settings of a single optimizer step in place of the configured ones; None keeps the configured one."""

    learning_rate: float | None = None
    """The rate of this step, without the schedule."""
    betas: tuple[float, float] | None = None
    epsilon: float | None = None
    weight_decay: float | None = None
    max_grad_norm: float | None = None
    """The gradient's norm after clipping; infinity does not clip."""

    def group_settings(self) -> dict[str, Any]:
        """Return the settings of parameter groups by torch's names."""
        overrides = {"betas": self.betas, "eps": self.epsilon, "weight_decay": self.weight_decay}
        return {name: value for name, value in overrides.items() if value is not None}


CONFIGURED = StepOverrides()
GROUP_SETTINGS = {"betas": "betas", "eps": "epsilon", "weight_decay": "weight_decay"}
"""The settings of parameter groups that a step may override, and their names in `StepOverrides`."""


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return True if all elements are finite; usually reads each tensor once."""
    floating = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    # The sum of squares is ten times as fast as the maximum on a CPU, but may overflow where the elements do not.
    return any(bool(torch.nn.utils.get_total_norm(floating, order).isfinite()) for order in (2.0, math.inf))


def learning_rate(iteration: int, config: TrainerConfig, peak: float) -> float:
    """Return the rate of iteration 1, 2, ...: linear warm-up, then constant, or linear or cosine decay to 0 after
    `steps`.
    """
    if iteration <= config.warmup_steps:
        return peak * iteration / config.warmup_steps
    done = (iteration - 1 - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    done = min(max(done, 0.0), 1.0)
    if config.schedule == "linear":
        return peak * (1 - done)
    if config.schedule == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * done))
    return peak


class MasterOptimizer:
    """The optimizer of one model.

    float32 and float64 weights are updated directly, without master copies.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: TrainerConfig,
        peak: float,
        ranks: DataParallel | None = None,
        numbers: Mapping[str, int] | None = None,
        rates: Mapping[str, float] | None = None,
    ) -> None:
        """Create the optimizer of a model's parameters by name; frozen ones are excluded.

        `numbers` are the indices of all parameters of the full model, of which a rank may hold only some; `rates` are
        the learning rates that differ from `peak`.
        """
        self.ranks = ranks or DataParallel()
        numbers = numbers or {name: number for number, name in enumerate(parameters)}
        self.count = len(numbers)
        """The number of parameters of the full model."""
        trained = [(numbers[name], name, p) for name, p in parameters.items() if p.requires_grad]
        self.names = [name for _, name, _ in trained]
        self.by_number = {number: p for number, _, p in trained}
        self.parameters = list(self.by_number.values())
        self.config, self.peak = config, peak
        parts = [local_shard(p) for p in self.parameters]
        self.masters = [p if p.dtype in (torch.float32, torch.float64) else p.detach().float() for p in parts]
        named = list(zip(self.names, map(as_dtensor, self.masters, self.parameters), strict=True))
        self.optimizer = make_optimizer(named, config, peak, rates)
        self.updated = trained_tensors(self.optimizer, self.names, config)
        """The tensors that the optimizer updates, in the memory of the masters."""
        self.shares = [group["lr"] / peak if peak else 1.0 for group in self.optimizer.param_groups]
        """Each parameter group's learning rate as a multiple of the model's."""
        self.group_settings = [
            {name: group[name] for name in GROUP_SETTINGS if name in group} for group in self.optimizer.param_groups
        ]
        self.sums: dict[str, list[Tensor | None]] = {}
        self.collecting: list[Tensor | None] = []
        self.steps = 0
        for i, parameter in enumerate(self.parameters):
            # Collect each gradient as soon as it is ready: memory holds the sums plus one parameter's gradient.
            parameter.register_post_accumulate_grad_hook(partial(_collect, ref(self), i))

    @torch.no_grad()
    def read_masters(self, files: Mapping[str, Tensor], stored: Mapping[str, str] | None = None) -> None:
        """Initialise master copies from the saved weights, before rounding to the model's dtype.

        A master that starts on a rounded weight must move half a rounding step before the weight changes. `files` holds
        full tensors in saved precision, of which some may be missing, and `stored` their names in it where they differ.
        """
        for name, parameter, master in zip(self.names, self.parameters, self.masters, strict=True):
            name = (stored or {}).get(name, name)
            if parameter.dtype != master.dtype and name in files:
                master.copy_(block_in(files, name, parameter))

    def collect(self, name: str) -> None:
        """Direct the gradients of later backward passes to this denominator's sum."""
        self.collecting = self.sums.setdefault(name, [None] * len(self.parameters))

    def step(
        self, denominators: Mapping[str, float], iteration: int, overrides: StepOverrides = CONFIGURED
    ) -> float | None:
        """Divide every sum by its global count, update, and return the gradient norm before clipping.

        All ranks pass the same denominators. A sum with count 0 is skipped; if all are, nothing is updated and None is
        returned. A parameter without a gradient on any rank stays as it is, without weight decay. If the norm is not
        finite, nothing is updated. Raises UserError if weights are not finite after the update, or for an override that
        the optimizer does not have.
        """
        self._set_groups(iteration, overrides)
        counted = {name: count for name, count in sorted(denominators.items()) if count > 0}
        sums = {name: self.sums.get(name, [None] * len(self.parameters)) for name in counted}
        if self.ranks.size > 1 and sums:
            has_gradient = self._on_any_rank(sums.values())
            reduced = [p for p, is_reduced in zip(self.parameters, has_gradient, strict=True) if is_reduced]
            for name, collected in sums.items():
                # A rank without rows contributes zeros.
                sums[name] = [
                    torch.zeros_like(master) if part is None and is_reduced else part
                    for part, master, is_reduced in zip(collected, self.masters, has_gradient, strict=True)
                ]
                self.ranks.all_reduce_gradients([part for part in sums[name] if part is not None], reduced)
        self.sums, self.collecting = {}, []
        if not counted:
            return None
        for i, master in enumerate(self.masters):
            parts = [part.div_(counted[name]) for name, all_parts in sums.items() if (part := all_parts[i]) is not None]
            master.grad = sum(parts[1:], parts[0]) if parts else None
        total = self.ranks.gradient_norm([master.grad for master in self.masters], self.parameters)
        most = self.config.max_grad_norm if overrides.max_grad_norm is None else overrides.max_grad_norm
        if most is not None and most != math.inf:
            torch.nn.utils.clip_grads_with_norm_(self.masters, most, total)
        norm = float(total)
        if math.isfinite(norm):
            for master, parameter, updated in zip(self.masters, self.parameters, self.updated, strict=True):
                if master.grad is not None and updated is not master:
                    updated.grad = as_dtensor(master.grad, parameter if isinstance(updated, DTensor) else updated)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for master in self.masters:
            master.grad = None
        if not math.isfinite(norm):
            return norm
        if not all_finite(self.masters):
            raise UserError(
                f"iteration {iteration}: weights are infinite or NaN after an update with learning rate "
                f"{self.optimizer.param_groups[0]['lr']:g} and gradient norm {norm:g}. They are not saved: resume from "
                "the last checkpoint with a lower trainer.learning_rate"
            )
        self.steps += 1
        self._publish()
        return norm

    def _on_any_rank(self, sums: Iterable[Sequence[Tensor | None]]) -> list[bool]:
        """Return whether each parameter has a gradient on any rank; all ranks call this together."""
        flags = torch.zeros(self.count, dtype=torch.int32)
        for parts in sums:
            flags[[number for number, part in zip(self.by_number, parts, strict=True) if part is not None]] = 1
        flags = self.ranks.largest_of(flags, "the parameters with a gradient")
        return [bool(flags[number]) for number in self.by_number]

    def _set_groups(self, iteration: int, overrides: StepOverrides) -> None:
        """Set this step's learning rate and settings in every parameter group."""
        overridden = overrides.group_settings()
        if lacking := [name for name in overridden if not any(name in settings for settings in self.group_settings)]:
            raise UserError(
                f"optim_step: {GROUP_SETTINGS[lacking[0]]} is not a setting of "
                f"trainer.optimizer={self.config.optimizer}; leave it out"
            )
        rate = overrides.learning_rate
        rate = learning_rate(iteration, self.config, self.peak) if rate is None else rate
        for group, share, settings in zip(self.optimizer.param_groups, self.shares, self.group_settings, strict=True):
            group["lr"] = rate * share
            group.update({name: overridden.get(name, value) for name, value in settings.items()})

    @torch.no_grad()
    def _publish(self) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if parameter.dtype != master.dtype:
                local_shard(parameter).copy_(master)

    @property
    def bytes_in_use(self) -> int:
        """Return the bytes of gradients, moments and master copies, from the first step on."""
        copies = [p.dtype != m.dtype for p, m in zip(self.parameters, self.masters, strict=True)]
        moments = 2 * moment_bytes(self.config) / MASTER_BYTES
        return int(sum(m.nbytes * (1 + moments + copied) for m, copied in zip(self.masters, copies, strict=True)))

    def tensors(self) -> list[Tensor]:
        """Return the optimizer's tensors, without the model's weights."""
        return [tensor for name, tensor in self.state().items() if name != "steps"]

    def groups(self) -> list[list[int]]:
        """Return the parameters' numbers by parameter group; the parameters of a group have the same state."""
        numbers = dict(zip(self.names, self.by_number, strict=True))
        return [[numbers[name] for name in group["param_names"]] for group in self.optimizer.param_groups]

    def state(self) -> dict[str, Tensor]:
        """Return the state for exact resume as flat tensors by name: master copies, moments, counts."""
        tensors = {"steps": torch.tensor(self.steps)}
        for (i, parameter), master, updated in zip(self.by_number.items(), self.masters, self.updated, strict=True):
            if parameter.dtype != master.dtype:
                tensors[f"{i}.master"] = master
            for name, value in self.optimizer.state.get(updated, {}).items():
                if value is None:
                    continue  # as in SGD without momentum
                # A checkpoint shards state like its parameter.
                divisible = isinstance(value, Tensor) and value.shape in (updated.shape, torch.Size())
                if not divisible and name not in UNDIVIDED:
                    raise UserError(
                        f"trainer.optimizer={self.config.optimizer} keeps {name!r}, which is no tensor of its "
                        "parameter's shape and no tensor of one number; a checkpoint holds only these"
                    )
                tensors[f"{i}.{name}"] = local_shard(value)
        return tensors

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore `state()` and drop collected gradients.

        Raises KeyError or RuntimeError if it belongs to another model.
        """
        self.steps, self.sums, self.collecting = int(tensors["steps"]), {}, []
        saved: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            number, _, name = key.partition(".")
            saved.setdefault(number, {})[name] = tensor
        for (i, parameter), master, updated in zip(self.by_number.items(), self.masters, self.updated, strict=True):
            states = saved.get(str(i), {})
            if (saved_master := states.pop("master", None)) is not None:
                master.copy_(saved_master)
            elif parameter.dtype != master.dtype:
                # Saved without master copies, from float32 weights; `read_masters` reads these in full.
                master.copy_(local_shard(parameter))
            self.optimizer.state.pop(updated, None)
            kind = parameter if isinstance(updated, DTensor) else master
            for name, tensor in states.items():
                tensor = tensor.to(master.device, copy=True)
                self.optimizer.state[updated][name] = as_dtensor(tensor, kind) if tensor.dim() else tensor
        self._publish()


def _collect(optimizer: "ref[MasterOptimizer]", i: int, parameter: Tensor) -> None:
    """Add a parameter's gradient to its optimizer's sum, if the optimizer still exists.

    A strong reference would leak optimizer and model: Python's garbage collector does not traverse a tensor's hooks.
    """
    gradient = parameter.grad
    if (owner := optimizer()) is None:
        return
    parameter.grad = None
    assert gradient is not None
    if isinstance(gradient, DTensor):
        # Reduce over the ranks that hold partial sums.
        assert isinstance(parameter, DTensor)
        gradient = local_shard(gradient.redistribute(placements=parameter.placements))
    collected = owner.collecting[i]
    owner.collecting[i] = gradient.to(owner.masters[i].dtype) if collected is None else collected.add_(gradient)
