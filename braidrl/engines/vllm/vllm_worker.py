"""Braid's extension of vLLM's workers: each receives a version of the weights, and writes its slices into vLLM's live
parameters.

path ──▶ worker: maps the file ─────────────┬─its own slices──▶ vLLM's live parameters
notice ──▶ worker: joins a group, receives ─┴─tensor by tensor──▶ vLLM's loaders, if it stores another form

Running vLLM's own loader on tensors without values finds the live parameters:

q_proj.weight, on the meta device ╮                       ╭─▶ rows 0 to 63 of qkv_proj.weight  a part: a view of the
k_proj.weight                     ┼─vLLM's loader: slices─┼─▶ rows 64 to 95                    parameter, and its block
v_proj.weight                     ╯         watched       ╰─▶ rows 96 to 127

The hub has experts one by one, a trainer has those of a layer in one tensor: a part then has several blocks.

No worker holds a full tensor. A model whose weights vLLM changes after it has loaded them (quantised, packed,
absorbed) has no such parts.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import layerwise
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler

from braidrl.data.token_columns import ROUTED_EXPERTS, column_of, to_text
from braidrl.engines.vllm.logits_processor import DrawByRow, DrawsOfDrafts
from braidrl.engines.vllm.route_recorder import RouteRecorder
from braidrl.weights.boxes import Box
from braidrl.weights.collective import Incoming, TransferNotice
from braidrl.weights.file import WeightFile
from braidrl.weights.model_files import HubNames, model_in
from braidrl.weights.shards import WeightPart

PLAIN = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, Attention)
"""Classes that compute with a parameter as it was loaded."""
PLAIN_EXPERTS = (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON, UnquantizedMoeBackend.CPU)
"""Backends of experts that do so; of a CPU as `compute_experts` replaces it."""


class WeightsNotLive(ValueError):
    """vLLM stores a model's weights in another form than it loads; the message names the module."""


class TakesWeights:
    """The extension that vLLM adds to its worker class (`worker_extension_cls`); `collective_rpc` calls its methods."""

    reload_weights: Callable[..., None]
    """An attribute of vLLM's worker, as are the next four."""
    model_runner: Any
    vllm_config: Any
    rank: int
    device: Any
    has_weights_in_part = False
    live: Mapping[str, WeightPart] | None = None
    """The live parameters; empty if vLLM stores them in another form, None before the lookup."""
    hub_names: HubNames | None = None
    """The conversion to the names that vLLM's loaders know, made once."""
    routes: RouteRecorder | None = None

    def prepare_columns(self, names: Sequence[str]) -> str | None:
        """Make these columns available to the next rows, by names as in `column_of`. Return the error, or None."""
        try:
            if ROUTED_EXPERTS in [column_of(name).name for name in names] and self.routes is None:
                self.routes = RouteRecorder(self.model_runner, self.vllm_config)
        except Exception as error:
            return str(error) or type(error).__name__
        return None

    def draw_drafts(self) -> None:
        """Draw the tokens of this worker's rows by their random numbers, also those that vLLM has drafted."""
        runner = self.model_runner
        draws = DrawByRow(self.vllm_config, self.device, False)
        runner.input_batch.logitsprocs.non_argmax_invariant.append(draws)
        runner.rejection_sampler = DrawsOfDrafts(draws, runner.rejection_sampler)

    def take_weights(self, path: str) -> None:
        """Load weights from a file. The caller has checked that they fit the model."""
        self.load_version(WeightFile(path))

    def receive_weights(self, notice: Mapping[str, Any]) -> str | None:
        """Load weights that the run sends to all workers; `notice` is plain JSON. Return the error, or None.

        vLLM's executor reads only the first worker's exception, and takes the others' exceptions for answers to its
        next calls.
        """
        parallel = self.vllm_config.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + self.rank
        try:
            self.load_version(Incoming(TransferNotice(**notice), worker, self.device))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    def take_values(self, rows: Sequence[str]) -> dict[str, dict[str, Tensor]]:
        """Return and forget the columns per token that this worker has computed for rows."""
        processors = self.model_runner.input_batch.logitsprocs.all
        values: dict[str, dict[str, Tensor]] = {} if self.routes is None else self.routes.take_values(rows)
        for processor in processors:
            if isinstance(processor, DrawByRow):
                for row, columns in processor.take_values(rows).items():
                    values[row] = values.get(row, {}) | columns
        return values

    def take_texts(self, row: str, unread: Sequence[str]) -> dict[str, dict[str, str]]:
        """Return `take_values` of a row as text, of one of the workers that compute the same; forget the values of rows
        that are `unread`.
        """
        values = self.take_values([row, *unread]).get(row, {})
        if get_tensor_model_parallel_rank():
            return {}
        return {row: {name: to_text(entries) for name, entries in values.items()}}

    def load_version(self, source: WeightFile | Incoming) -> None:
        """Load into the live parameters, otherwise tensor by tensor.

        After a failure of the former the next version must be loaded in full.
        """
        config = self.vllm_config.model_config
        if self.live is None:
            # `model_config.model` becomes the folder of the last update, which may have been removed.
            model = model_in(Path(config.hf_config.name_or_path))
            self.hub_names = HubNames(model)
            try:
                self.live = live_parts(self.model_runner.get_model(), model, self.hub_names, config.dtype)
            except WeightsNotLive:
                self.live = {}
        if self.live:
            source.put_into(self.live)
            self.model_runner.reset_encoder_cache()
            self.model_runner.reset_mm_cache()
        else:
            self.load_as_they_come(source.tensors())

    def load_as_they_come(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Load tensors one by one.

        Nothing changes before the first tensor arrives. If the tensors end in the middle, or vLLM leaves some
        unchanged, this and all later calls raise RuntimeError: after a partial load vLLM would take the next version's
        tensors for the missing ones.
        """
        if self.has_weights_in_part:
            raise RuntimeError("only a part of an earlier version arrived: vLLM must be restarted")
        assert self.hub_names is not None
        first, sinks, model = next(tensors), dict[str, Tensor](), self.model_runner.get_model()
        come = self.hub_names.of(chain([first], tensors))
        if self.vllm_config.model_config.hf_config.model_type == "gpt_oss":
            come = parts_of_gpt_oss(come, sinks)
        try:
            with unloaded_parameters(model) as unloaded:
                self.reload_weights(weights_iterator=come)
            if missing := sorted(set(unloaded) - load_sinks(model, sinks)):
                raise RuntimeError(f"vLLM gives {missing[0]} no new values, and {len(missing) - 1} more")
        except BaseException:
            self.has_weights_in_part = True
            raise


class LoadedBlock(NamedTuple):
    """A block of one of the trainer's tensors, and where a worker keeps it."""

    box: Box
    target: Tensor


def live_parts(vllm_model: Any, model: nn.Module, hub_names: HubNames, dtype: torch.dtype) -> dict[str, WeightPart]:
    """Return this worker's parts of vLLM's loaded module, by the names of the trainer's `model`; a tied tensor under
    the name that vLLM loads.

    `model` may be on the meta device; `dtype` is vLLM's dtype of computation. Raises WeightsNotLive if it stores
    some of the weights in another form.
    """
    for name, module in vllm_model.named_modules():
        method = getattr(module, "quant_method", module)
        if hasattr(method, "process_weights_after_loading") and not computes_as_loaded(method):
            raise WeightsNotLive(f"vLLM changes {name or 'the model'} after loading ({type(method).__name__})")
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    blocks: dict[str, list[LoadedBlock]] = {}
    for name, block in loaded_blocks(vllm_model, shapes, hub_names, dtype):
        blocks.setdefault(name, []).append(block)
    parts = {name: part_of(name, shapes[name], of_tensor) for name, of_tensor in blocks.items()}
    filled = {block.target.untyped_storage()._cdata for of_tensor in blocks.values() for block in of_tensor}
    for name, parameter in vllm_model.named_parameters():
        if parameter.untyped_storage()._cdata not in filled:
            raise WeightsNotLive(f"vLLM makes {name} itself")
    return parts


def computes_as_loaded(method: Any) -> bool:
    """Return whether one of vLLM's modules or methods computes with its parameters as they were loaded."""
    if isinstance(method, UnquantizedFusedMoEMethod):
        return method.unquantized_backend in PLAIN_EXPERTS
    return isinstance(method, PLAIN)


def loaded_blocks(
    vllm_model: Any, shapes: Mapping[str, torch.Size], hub_names: HubNames, dtype: torch.dtype
) -> Iterator[tuple[str, LoadedBlock]]:
    """Yield the blocks that vLLM's loader writes to its parameters, by name of the trainer's tensor.

    Raises WeightsNotLive if it writes anything else.
    """
    sources: dict[str, tuple[str, torch.Size, Box]] = {}
    for name, shape in shapes.items():
        blocks = hub_names.blocks_of(name, shape)
        if blocks is None:
            raise WeightsNotLive(f"the hub keeps {name} in another form")
        sources |= {stored: (name, stored_shape, box) for stored, stored_shape, box in blocks}
    checkpoint = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (_, shape, _) in sources.items()}
    with CopyWatch() as watch:
        try:
            vllm_model.load_weights(iter(checkpoint.items()))
        except Exception as error:
            raise WeightsNotLive(f"vLLM computes with values while it loads them ({error})") from error
    names = {tensor.untyped_storage()._cdata: name for name, tensor in checkpoint.items()}
    for target, view in watch.copies:
        stored = names.get(view.untyped_storage()._cdata)
        # vLLM keeps the matrices of some experts transposed: their dimensions in the order of the stored tensor.
        order = sorted(range(view.dim()), key=view.stride, reverse=True)
        orders = [] if stored is None else [list(range(view.dim())), order]
        blocks_by_order = ((axes, block_of(view.permute(axes), checkpoint[str(stored)].shape)) for axes in orders)
        axes, inner = next(((axes, block) for axes, block in blocks_by_order if block is not None), ([], None))
        if stored is None or inner is None:
            raise WeightsNotLive(f"vLLM puts {stored or 'a computed tensor'} together of several pieces")
        name, _, box = sources[stored]
        if view.untyped_storage()._cdata in watch.zeroed:
            # A bias that only the first of the workers adds. The others' zeros stay, in blocks of no elements.
            if target.is_cuda:
                raise WeightsNotLive(f"vLLM sets {stored} to zero here, and frees the zeros when it sleeps")
            inner, target = replace(inner, sizes=(0, *inner.sizes[1:])), target[:0]
        target = target.permute(axes)
        yield name, LoadedBlock(box.nested(inner), target.view(*(1,) * (len(box.sizes) - target.dim()), *target.shape))


def part_of(name: str, shape: torch.Size, blocks: Sequence[LoadedBlock]) -> WeightPart:
    """Return the part of a tensor whose blocks are these, of several experts where their memory is evenly spaced.

    Raises WeightsNotLive for blocks that overlap, which vLLM keeps twice.
    """
    joined: list[LoadedBlock] = []
    for block in sorted(blocks, key=lambda block: (block.box.offsets[1:], block.box.offsets[:1])):
        if joined and (both := joined_blocks(joined[-1], block)) is not None:
            joined[-1] = both
        else:
            joined.append(block)
    if any(a.box.overlap(b.box) for number, a in enumerate(joined) for b in joined[:number]):
        raise WeightsNotLive(f"vLLM keeps {name} twice")
    first, *further = (WeightPart([name], block.target, (shape, block.box)) for block in joined)
    return replace(first, other_parts=tuple(further))


def joined_blocks(a: LoadedBlock, b: LoadedBlock) -> LoadedBlock | None:
    """Return two blocks adjacent in the first dimension as one; None if their memory is not evenly spaced."""
    if not a.box.sizes:
        return None
    count, start = a.box.sizes[0], a.box.offsets[0]
    end = start + count + b.box.sizes[0]
    step = (b.target.storage_offset() - a.target.storage_offset()) // count
    strides = (step, *a.target.stride()[1:])
    both = a.target.as_strided((end - start, *a.box.sizes[1:]), strides)
    is_even = all(len(t) == 1 or t.stride() == strides for t in (a.target, b.target))
    is_next = b.box == a.box.along(0, start + count, end) and both[count:].data_ptr() == b.target.data_ptr()
    return LoadedBlock(a.box.along(0, start, end), both) if is_even and is_next else None


def block_of(view: Tensor, shape: torch.Size) -> Box | None:
    """Return the block that a view of a contiguous tensor of this shape covers; None if it is not a block."""
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    axes = zip(view.shape, view.stride(), strides, strict=False)
    if view.dim() != len(shape) or any(size > 1 and step != stride for size, step, stride in axes):
        return None
    offsets, rest = [], int(view.storage_offset())
    for stride in strides:
        offsets.append(rest // stride)
        rest %= stride
    return Box(tuple(offsets), tuple(view.shape))


class CopyWatch(TorchDispatchMode):
    """Records copies from views of meta tensors to parameters instead of making them; contiguous copies of such views
    stay views.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.zeroed = set[int]()
        """The storages of meta tensors that were set to zero."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            self.copies.append((args[0], args[1]))
            return args[0]
        if func is torch.ops.aten.clone.default and args[0].is_meta:
            return args[0]
        if func is torch.ops.aten.zero_.default and args[0].is_meta:
            self.zeroed.add(args[0].untyped_storage()._cdata)
        return func(*args, **(kwargs or {}))


@contextmanager
def unloaded_parameters(model: nn.Module) -> Iterator[list[str]]:
    """Collect the names of parameters that a reload inside the block does not set; vLLM keeps the earlier values and
    logs a warning.
    """
    unloaded: list[str] = []
    missed, loaded = set[int](), set[int]()
    original = layerwise._place_kernel_tensors

    def watched(layer: Any, info: Any) -> None:
        ids = {id(parameter) for parameter in info.kernel_tensors[0].values()}
        # Attention's scales are not in checkpoints.
        if info.load_numel <= 0 and not is_deferred_attention_layer(layer):
            missed.update(ids)
        else:
            loaded.update(ids)
        original(layer, info)

    layerwise._place_kernel_tensors = watched
    try:
        yield unloaded
    finally:
        layerwise._place_kernel_tensors = original
    unloaded += [name for name, weight in model.named_parameters() if id(weight) in missed - loaded]


def parts_of_gpt_oss(tensors: Iterable[tuple[str, Tensor]], sinks: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield each expert separately and keep attention sinks for `load_sinks`: vLLM's loader copies both in a way that a
    reload cannot record.
    """
    for name, tensor in tensors:
        layer, experts, part = name.partition(".mlp.experts.")
        if experts:
            yield from ((f"{layer}{experts}{number}.{part}", expert) for number, expert in enumerate(tensor))
        elif name.endswith(".sinks"):
            sinks[name] = tensor.clone()
        else:
            yield name, tensor


@torch.no_grad()
def load_sinks(model: nn.Module, sinks: Mapping[str, Tensor]) -> set[str]:
    """Copy this worker's attention sinks of gpt_oss into its live parameters; return their names there."""
    live = dict(model.named_parameters())
    names = {name: name.replace(".self_attn.", ".attn.") for name in sinks}
    for name, live_name in names.items():
        rank, count = get_tensor_model_parallel_rank(), len(live[live_name])
        live[live_name].data.copy_(sinks[name][rank * count : (rank + 1) * count])
    return set(names.values())


def rotate(self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Rotate all heads: vLLM's kernel rotates only the first head of the queries (tokens, heads, width) of latent
    attention.
    """
    rotated = self.forward_native if query.dim() > 2 else partial(ROTATE_IN_PLACE, self)
    result: tuple[Tensor, Tensor | None] = rotated(positions, query, key)
    return result


def compute_plainly(layer: Any, remove_weight: bool) -> None:
    """Compute with the loaded weights instead of packing them: no transfer can write to packed memory."""
    layer.cpu_linear = nn.functional.linear


def keep_experts(self: Any, layer: Any) -> None:
    """Leave experts as they were loaded, where vLLM would pack them."""


def compute_experts(
    self: Any,
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: MoEActivation,
    global_num_experts: int,
    expert_map: Tensor | None,
    *buffers: object,
    apply_router_weight_on_input: bool = False,
    **named_buffers: object,
) -> None:
    """Add up the outputs of each token's experts, as vLLM's method of the same arguments does from packed weights.

    `w1` (experts, gate and up, width) and `w2` (experts, width, inner) are this worker's; `expert_map` has their
    numbers.
    """
    output.zero_()
    for expert in topk_ids.unique().tolist():
        local = expert if expert_map is None else int(expert_map[expert])
        if local < 0:
            continue
        tokens, choice = (topk_ids == expert).nonzero(as_tuple=True)
        bias1, bias2 = (None if bias is None else bias[local] for bias in (self.w1_bias, self.w2_bias))
        inner = activated(activation, nn.functional.linear(hidden_states[tokens], w1[local], bias1))
        of_expert = nn.functional.linear(inner, w2[local], bias2)
        if not apply_router_weight_on_input:
            of_expert = of_expert * topk_weights[tokens, choice, None].to(of_expert.dtype)
        output.index_add_(0, tokens, of_expert)


def activated(activation: MoEActivation, gate_up: Tensor) -> Tensor:
    """Return the inner values (N, I) of gated experts; `gate_up` is (N, 2 I), gpt-oss's in pairs."""
    if activation is MoEActivation.SWIGLUOAI:
        gate, up = gate_up[..., ::2].clamp(max=7.0), gate_up[..., 1::2].clamp(-7.0, 7.0)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)
    gate, up = gate_up.chunk(2, -1)
    if activation is MoEActivation.SILU:
        return nn.functional.silu(gate) * up
    return nn.functional.gelu(gate, approximate="tanh" if activation is MoEActivation.GELU_TANH else "none") * up


def of_each_draft(values: Tensor, ends: Tensor, count: int, replace_from: int = 0, replace_to: int = 0) -> Tensor:
    """Repeat a value (B,) of each row for all its draft tokens, (N,); `ends` are the cumulative numbers of tokens.

    vLLM's kernel for the temperature of draft tokens writes to a copy, which leaves temperatures uninitialised.
    """
    replaced = torch.where(values == replace_from, replace_to, values)
    return replaced.repeat_interleave(ends.diff(prepend=ends.new_zeros(1)), output_size=count)


# vLLM imports this module in each worker before it loads the model. Its kernels for CPUs are repaired or replaced here.
ROTATE_IN_PLACE = RotaryEmbedding.forward_cpu
if current_platform.is_cpu():
    RotaryEmbedding.forward_cpu = rotate
    utils.dispatch_cpu_unquantized_gemm = compute_plainly
    CPUUnquantizedExperts.process_weights_after_loading, CPUUnquantizedExperts.apply = keep_experts, compute_experts
    rejection_sampler.expand_batch_to_tokens = of_each_draft
