"""Expert parallelism: ranks with different tokens shard the experts of each layer, and exchange tokens by all-to-all.

rank 0   its tokens, by chosen expert ╮              ╭ rows of experts 0, 1 ──up, gate, down──╮              ╭ weighted
rank 1   its tokens, by chosen expert ┴─ all-to-all ─┴ rows of experts 2, 3 ──up, gate, down──┴─ all-to-all ─┴ sums

All ranks of a pipeline stage compute different tokens in a block of experts: along `data` those of other rows, along
`sequence`, `context` and `tensor` other tokens of the same rows. The `expert` axis takes neighbors among them,
regardless of their axes; ranks along `copies` have the same experts, and sum their gradients.

A rank's gradient of its experts is the sum over the tokens of all ranks of its group: they came to it. It is neither
averaged nor multiplied. The router is replicated and computes local tokens.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from braidrl.errors import UserError
from braidrl.training.compute.experts import DOWN, EXPERTS, UP, Sorting
from braidrl.training.parallel.sequence import AllToAll
from braidrl.weights.boxes import Box, chunk

EXPERT, COPIES = "expert", "copies"
"""The dimensions of the mesh of experts: ranks with other experts, and ranks with the same."""


def experts_of(layer: nn.Module) -> list[Any]:
    """Return the modules of a layer, or a model, that hold experts as stacked matrices (experts, out, in)."""
    return [
        module
        for module in layer.modules()
        if isinstance(getattr(module, "num_experts", None), int)
        and any(p.dim() == 3 for p in module.parameters(recurse=False))
    ]


def expert_blocks(model: nn.Module, rank: int, ranks: int) -> dict[str, Box]:
    """Return the block of each stack of experts that one of `ranks` holds, by the stack's name; the last ranks may have
    fewer experts.
    """
    names, blocks = {id(p): name for name, p in model.named_parameters()}, {}
    for module in experts_of(model):
        start, count = chunk(module.num_experts, rank, ranks)
        for parameter in module.parameters(recurse=False):
            if len(parameter) == module.num_experts:
                blocks[names[id(parameter)]] = Box.whole(parameter.shape).along(0, start, start + count)
    return blocks


def is_of_experts(parameter: Tensor) -> bool:
    """Return True if a parameter is sharded by experts."""
    return isinstance(parameter, DTensor) and EXPERT in (parameter.device_mesh.mesh_dim_names or ())


def check_experts(experts: int | None, ranks: int, key: str = "trainer.layout") -> None:
    """Raise UserError, with `key`, if a model has no experts, or a number that the axis does not divide."""
    if not experts:
        raise UserError(f"{key}: expert={ranks} is for models with experts, and this one has none; write expert=1")
    if experts % ranks:
        raise UserError(
            f"{key}: the model has {experts} experts, which expert={ranks} does not divide; write a number that "
            f"divides {experts}"
        )


def shard_experts(layer: nn.Module, mesh: DeviceMesh) -> list[Any]:
    """Keep a rank's experts of a layer in place, and make them exchange tokens; return their modules.

    The layer may already hold only these experts. `mesh` has only the dimension `expert`. Raises UserError for experts
    that transformers computes separately.
    """
    modules = experts_of(layer)
    for module in modules:
        if not hasattr(module, "has_gate"):
            raise UserError(
                f"trainer.layout: expert={mesh.size()}: transformers computes {type(module).__name__} one by one; "
                "write expert=1"
            )
        check_experts(module.num_experts, mesh.size())
        start, count = chunk(module.num_experts, mesh.get_local_rank(), mesh.size())
        for holder, name, parameter in stacked_parameters(module):
            if len(parameter) in (module.num_experts, count):
                local = parameter.detach()
                if len(local) != count:  # a model that was read in full
                    local = local[start : start + count].clone(memory_format=torch.contiguous_format)
                sharded = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
                setattr(holder, name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))
        module.forward = Dispatch(module, mesh.get_group())
    return modules


def stacked_parameters(module: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Return the parameters of a module of experts and of its adapters, each with the module that holds it."""
    holders = [module, *(getattr(module, name) for name in (DOWN, UP) if hasattr(module, name))]
    return [(holder, *named) for holder in holders for named in holder.named_parameters(recurse=False)]


class LocalExperts:
    """This rank's experts of a module, with plain tensors, for functions of experts."""

    def __init__(self, module: Any, count: int) -> None:
        self._module, self.num_experts = module, count

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if isinstance(value, nn.ParameterDict):
            return {key: factor.to_local() for key, factor in value.items()}
        return value.to_local() if isinstance(value, DTensor) else value


class Dispatch:
    """The forward of a module of experts: sends each row to the rank of its expert, and adds the results by token."""

    def __init__(self, module: Any, group: dist.ProcessGroup) -> None:
        self.group = group
        self.experts = LocalExperts(module, module.num_experts // group.size())

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sums (T, D) of the experts `top_k_index` (T, K) of local tokens (T, D).

        All ranks of the group call this together; each has a token.
        """
        chosen, sorting = top_k_index.reshape(-1), Sorting.of(top_k_index)
        counts = chosen.bincount(minlength=self.experts.num_experts * self.group.size())
        coming = torch.empty_like(counts)
        dist.all_to_all_single(coming, counts, group=self.group)
        by_rank = (self.group.size(), self.experts.num_experts)
        sent, arriving = counts.view(by_rank).sum(1).tolist(), coming.view(by_rank).sum(1).tolist()
        rows = AllToAll.apply(sorting.rows_of(hidden_states), sent, arriving, self.group)
        numbers = torch.arange(self.experts.num_experts, device=chosen.device).repeat(self.group.size())
        numbers = numbers.repeat_interleave(coming)
        results = AllToAll.apply(self._computed(rows, numbers), arriving, sent, self.group)
        return sorting.summed(results, top_k_weights).to(hidden_states.dtype)

    def _computed(self, rows: Tensor, numbers: Tensor) -> Tensor:
        """Return each row (R, D) after its local expert, with weight one."""
        received = len(rows)
        if not received:
            # A filler row, whose result is dropped: the rank's experts have gradients, of zero, and its exchange a
            # backward pass.
            rows, numbers = torch.cat([rows, rows.new_zeros((1, *rows.shape[1:]))]), numbers.new_zeros(1)
        forward = ALL_EXPERTS_FUNCTIONS[EXPERTS]
        outputs: Tensor = forward(self.experts, rows, numbers[:, None], rows.new_ones((len(rows), 1)))
        return outputs[:received]
