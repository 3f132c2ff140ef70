"""Expert parallelism: ranks with different tokens shard the experts of each layer, and exchange tokens by all-to-all.

rank 0   its tokens, by chosen expert ╮              ╭ rows of experts 0, 1 ──up, gate, down──╮              ╭ weighted
rank 1   its tokens, by chosen expert ┴─ all-to-all ─┴ rows of experts 2, 3 ──up, gate, down──┴─ all-to-all ─┴ sums

All ranks of a pipeline stage compute different tokens in a block of experts: along `data` those of other rows, along
`sequence`, `context` and `tensor` other tokens of the same rows. The `expert` axis takes neighbors among them,
regardless of their axes; ranks along `copies` have the same experts, and sum their gradients.

A rank's gradient of its experts is the sum over the tokens of all ranks of its group: they came to it. It is neither
averaged nor multiplied. The router is replicated and computes local tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from braidrl.errors import UserError
from braidrl.training.compute.expert_forms import GatedExperts, LocalExperts, TransposedExperts, rows_of_experts
from braidrl.training.compute.experts import DOWN, UP, Sorting
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


def dispatch_of(module: nn.Module) -> "type[Dispatch] | None":
    """Return the exchange of tokens that fits the forward of a module of experts; None if there is none."""
    return Dispatch if hasattr(module, "has_gate") else OTHER_FORMS.get(type(module).__name__)


def shard_experts(layer: nn.Module, mesh: DeviceMesh) -> list[Any]:
    """Keep a rank's experts of a layer in place, and make them exchange tokens; return their modules.

    The layer may already hold only these experts. `mesh` has only the dimension `expert`. Raises UserError for experts
    whose forward no exchange fits.
    """
    modules = experts_of(layer)
    for module in modules:
        if (dispatch := dispatch_of(module)) is None:
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
        module.forward = dispatch(module, mesh.get_group())
    return modules


def stacked_parameters(module: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Return the parameters of a module of experts and of its adapters, each with the module that holds it."""
    holders = [module, *(getattr(module, name) for name in (DOWN, UP) if hasattr(module, name))]
    return [(holder, *named) for holder in holders for named in holder.named_parameters(recurse=False)]


class Dispatch:
    """The forward of a module of experts: sends each row to the rank of its expert, and adds the results by token."""

    def __init__(self, module: Any, group: dist.ProcessGroup) -> None:
        self.group = group
        self.experts = LocalExperts(module, module.num_experts // group.size())

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sums (T, D) of the experts `top_k_index` (T, K) of local tokens (T, D).

        All ranks of the group call this together; each has a token.
        """
        sorting = Sorting.of(top_k_index)
        counts = top_k_index.reshape(-1).bincount(minlength=self.experts.num_experts * self.group.size())
        results = self.exchanged(sorting.rows_of(hidden_states), counts)
        return sorting.summed(results, top_k_weights).to(hidden_states.dtype)

    def exchanged(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return rows (R, D) after their experts; the rows are sorted by expert, of which `counts` (E,) say how many
        each has.
        """
        coming = torch.empty_like(counts)
        dist.all_to_all_single(coming, counts, group=self.group)
        by_rank = (self.group.size(), self.experts.num_experts)
        sent, arriving = counts.view(by_rank).sum(1).tolist(), coming.view(by_rank).sum(1).tolist()
        received = AllToAll.apply(rows, sent, arriving, self.group)
        numbers = torch.arange(self.experts.num_experts, device=rows.device).repeat(self.group.size())
        results: Tensor = AllToAll.apply(
            self._computed(received, numbers.repeat_interleave(coming)), arriving, sent, self.group
        )
        return results

    def _computed(self, rows: Tensor, numbers: Tensor) -> Tensor:
        """Return each row (R, D) after its local expert, with weight one."""
        received = len(rows)
        if not received:
            # A filler row, whose result is dropped: the rank's experts have gradients, of zero, and its exchange a
            # backward pass.
            rows, numbers = torch.cat([rows, rows.new_zeros((1, *rows.shape[1:]))]), numbers.new_zeros(1)
        return self.local_results(rows, numbers)[:received]

    def local_results(self, rows: Tensor, numbers: Tensor) -> Tensor:
        """Return each row (R, D) after the local expert of its number, R of at least one."""
        return rows_of_experts(self.experts, rows, numbers)


class SortedDispatch(Dispatch):
    """The forward of a matrix for each expert, which gets rows sorted by expert, as in JetMoE."""

    def __call__(self, inputs: Tensor, expert_size: Sequence[int]) -> Tensor:  # type: ignore[override]
        """Return the product of each row (R, in) with the matrix of its expert; each expert has as many rows as
        `expert_size` says.
        """
        return self.exchanged(inputs, torch.tensor(expert_size, device=inputs.device))

    def local_results(self, rows: Tensor, numbers: Tensor) -> Tensor:
        sorting = Sorting.of(numbers[:, None])
        sizes = numbers.bincount(minlength=self.experts.num_experts).tolist()
        outputs: Tensor = type(self.experts.module).forward(self.experts, sorting.rows_of(rows), sizes)
        return outputs.index_select(0, sorting.positions)


class CopiesDispatch(Dispatch):
    """The forward of experts that get a copy of all tokens each, times the router's scores, as in Llama 4.

    A token has a score of 0 for an expert that was not chosen, and such a row a result of 0: it is not sent.
    """

    def __init__(self, module: Any, group: dist.ProcessGroup) -> None:
        super().__init__(module, group)
        self.experts = TransposedExperts(module, self.experts.num_experts)

    def __call__(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        """Return the results (E·T, D) of the copies (E·T, D), which are sorted by expert."""
        experts = self.experts.num_experts * self.group.size()
        chosen = hidden_states.detach().ne(0).any(-1).nonzero()[:, 0]
        counts = (chosen // (len(hidden_states) // experts)).bincount(minlength=experts)
        results = self.exchanged(hidden_states.index_select(0, chosen), counts)
        return torch.zeros_like(hidden_states).index_add(0, chosen, results)


class WeightlessDispatch(Dispatch):
    """The forward of experts behind which others, without weights, return their token, as in LongCat-Flash."""

    def __init__(self, module: Any, group: dist.ProcessGroup) -> None:
        super().__init__(module, group)
        self.experts = GatedExperts(module, self.experts.num_experts)

    def exchanged(self, rows: Tensor, counts: Tensor) -> Tensor:
        with_weights = self.experts.num_experts * self.group.size()
        sent = int(counts[:with_weights].sum())
        return torch.cat([super().exchanged(rows[:sent], counts[:with_weights]), rows[sent:]])


OTHER_FORMS: dict[str, type[Dispatch]] = {
    "JetMoeParallelExperts": SortedDispatch,
    "Llama4TextExperts": CopiesDispatch,
    "LongcatFlashExperts": WeightlessDispatch,
}
"""The exchanges of experts without transformers' common forward, by the name of their class."""
