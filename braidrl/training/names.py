"""The training backends and optimizers by name. A configuration names them before torch is loaded."""

from braidrl.importing import PluginRegistry

BACKENDS = PluginRegistry(
    "training backend",
    {"torch": "braidrl.training.roles.worker:RoleWorker"},
    arguments=("spec",),
    methods=("forward", "forward_backward", "optim_step", "tensors", "load", "export"),
)
"""Training backends by name: functions from a `BackendSpec` to a `TrainingBackend`."""
OPTIMIZERS = PluginRegistry(
    "optimizer", {name: f"braidrl.training.optimizer:{name}" for name in ("adamw", "adamw8bit", "sgd")}
)
"""Optimizers by name: called with pairs of name and tensor, `lr` and settings by keyword, as in `torch.optim`."""
FEATURES = (
    "tensor",
    "pipeline",
    "sequence",
    "context",
    "expert",
    "shard",
    "streaming",
    "offload",
    "lora",
    "copies",
    "optimizers",
    "checkpoint_async",
)
"""Features of the built-in backend, each of which another may declare in `supports`.

`streaming`, `offload` and `copies` need `weights`.
"""


def supported(backend: str) -> frozenset[str]:
    """Return the features of a backend. Raises UserError if there is none of this name."""
    return frozenset(FEATURES if backend in BACKENDS else getattr(BACKENDS.find(backend), "supports", ()))
