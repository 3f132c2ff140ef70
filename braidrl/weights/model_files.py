"""A directory's tensors by the names and shapes of a model, converted lazily.

    experts.0.gate_proj.weight ╮
    experts.0.up_proj.weight   ┼──transformers' conversions──▶ experts.gate_up_proj      the hub's names ─▶ the module's
    experts.1.gate_proj.weight ╯

Reading a tensor reads only its sources. `HubNames` does the reverse, tensor by tensor, for engines; transformers'
`save_pretrained` does it for checkpoints. Weights in FP8 with block scales (`NAME_scale_inv`) and experts in MXFP4
(`NAME_blocks`, `NAME_scales`) are dequantised.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming, rename_source_key
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.modeling_layers import GenericForSequenceClassification

from braidrl.weights.boxes import Box
from braidrl.weights.checkpoint_files import WeightFiles
from braidrl.weights.shards import WeightPart

SCALE, BLOCKS, SCALES = "_scale_inv", "_blocks", "_scales"
"""Name suffixes of the parts of quantised weights."""
Inputs = list[tuple[str, str, str]]
"""The inputs of a conversion: (target name, source name, matched pattern)."""


class ModelFiles(WeightFiles):
    """`WeightFiles` addressed by a model's own names."""

    def __init__(self, folder: Path, model: Any) -> None:
        super().__init__(folder)
        self._model = model
        self._stored, path = dict(self._files), folder.expanduser() / "config.json"
        settings = json.loads(path.read_text()) if path.is_file() else {}
        self._block = tuple((settings.get("quantization_config") or {}).get("weight_block_size") or (128, 128))
        for name in self._stored:
            base = name.removesuffix(BLOCKS)
            if name.endswith((SCALE, SCALES)):
                del self._files[name]
            elif base != name:
                self._files[base] = self._files.pop(name)
        conversions = get_model_conversion_mapping(model)
        self._made_by: dict[str, tuple[Any, Inputs]] = {}
        self._shapes: dict[str, torch.Size] = {}
        state = model.state_dict(keep_vars=True)
        self.left_out: dict[str, list[str]] = {}
        """The stored tensors that the model lacks, by the names that they would have in it (layers that predict several
        tokens, towers of a model that is loaded for its text alone).
        """
        if conversions or not all(name in state for name in self._files):
            # Find the conversion that produces each of the model's tensors, from shapes alone.
            groups = planned(self._files, conversions, model.base_model_prefix, state)
            for target, (conversion, parts) in groups.items():
                shapes = {source: torch.empty(self._stored_shape(source), device="meta") for _, source, _ in parts}
                results = converted(model, conversion, parts, shapes)
                if not any(name in state for name in results):
                    self.left_out[target] = [source for _, source, _ in parts]
                for name, value in results.items():
                    self._made_by[name] = conversion, parts
                    self._shapes[name] = value.shape
            self._files = dict.fromkeys(self._made_by)
        self._last: tuple[Any, dict[str, Tensor]] = (None, {})
        self._hub: HubNames | None = None

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._made_by:
            return self._read(name)
        conversion, parts = self._made_by[name]
        if self._last[0] is not parts:
            values = {source: self._read(source) for _, source, _ in parts}
            self._last = parts, converted(self._model, conversion, parts, values)
        return self._last[1][name]

    def block(self, name: str, box: Box) -> Tensor:
        """Return a block of a tensor.

        The hub stores experts one by one: only those in the block are read.
        """
        if name not in self._made_by:
            return box.of(self._read(name))
        self._hub = self._hub or HubNames(self._model)
        parts = self._hub.blocks_of(name, self._shapes[name])
        if parts is None or any(target not in self._stored for target, _, _ in parts):
            return box.of(self[name])
        tensor: Tensor | None = None
        for target, shape, part_box in parts:
            if (overlap := part_box.overlap(box)) is None:
                continue
            starts = [at - start for at, start in zip(overlap.offsets, part_box.offsets, strict=True)]
            lacking = len(part_box.sizes) - len(shape)
            values = Box(tuple(starts[lacking:]), overlap.sizes[lacking:]).of(self._read(target))
            tensor = torch.empty(box.sizes, dtype=values.dtype) if tensor is None else tensor
            overlap.of(tensor, box).copy_(values.view(overlap.sizes))
        return torch.empty(box.sizes) if tensor is None else tensor

    def stored(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read tensors by the names that they have in the files."""
        return {name: self._read(name) for name in names}

    def without(self, names: Set[str]) -> "ModelFiles":
        """Remove tensors by name; return self."""
        for name in names:
            del self._files[name]
        return self

    def shape(self, name: str) -> torch.Size:
        return self._shapes[name] if name in self._shapes else self._stored_shape(name)

    def _read(self, name: str) -> Tensor:
        """Read one stored tensor, dequantised: FP8 in float32, with a scale per block of (N, K) or one scale per
        tensor; MXFP4 in bfloat16.
        """
        stored = {
            key: self._stored[key].get_tensor(key)
            for key in (name, name + SCALE, name + BLOCKS, name + SCALES)
            if key in self._stored
        }
        if name + BLOCKS in stored:
            return convert_moe_packed_tensors(stored[name + BLOCKS], stored[name + SCALES], dtype=torch.bfloat16)
        values: Tensor = stored[name]
        if name + SCALE not in stored:
            return values
        scales, wide = stored[name + SCALE], values.to(torch.float32)
        if scales.numel() == 1:
            return wide * scales.to(torch.float32)
        for dimension, size in zip((-2, -1), self._block, strict=True):
            scales = scales.repeat_interleave(size, dimension).narrow(dimension, 0, values.shape[dimension])
        return wide * scales.to(torch.float32)

    def _stored_shape(self, name: str) -> torch.Size:
        if name + BLOCKS in self._stored:
            experts, rows, groups, half = self._stored[name + BLOCKS].get_slice(name + BLOCKS).get_shape()
            return torch.Size((experts, groups * half * 2, rows))
        return torch.Size(self._stored[name].get_slice(name).get_shape())


def planned(
    sources: Iterable[str], conversions: list[Any], *about: Any, reverse: bool = False
) -> dict[str, tuple[Any, Inputs]]:
    """Return, by target name, the conversion that makes it, and its inputs, in the order of the numbers in names.

    `about` is the base model's prefix and state, where the sources are the hub's names; in `reverse` the sources are
    the model's names.
    """
    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
    by_pattern = {pattern: conversion for conversion in converters for pattern in conversion.source_patterns}
    groups: dict[str, tuple[Any, Inputs]] = {}
    for source in sorted(sources, key=by_numbers):
        target, pattern = rename_source_key(source, renamings, converters, *about, reverse=reverse)
        made_by = WeightRenaming(source, target) if pattern is None else by_pattern[pattern]
        groups.setdefault(target, (made_by, []))[1].append((target, source, pattern or source))
    return groups


def by_numbers(name: str) -> list[tuple[int, int | str]]:
    """Return the key by which names are sorted in the order of the numbers in them, as in `shard_2` and `shard_10`."""
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", name)]


def converted(model: Any, conversion: Any, parts: Inputs, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the results of a conversion by name, from the values of its parts by source name."""
    copied, target = deepcopy(conversion), ""
    for target, source, pattern in parts:
        copied.add_tensor(target, source, pattern, values[source])
    tensors = copied.convert(target, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in tensors.items()}


class HubNames:
    """The conversion of a model's tensors to the names and shapes of the hub's files, as `save_pretrained` does it."""

    def __init__(self, model: Any, names: Iterable[str] | None = None) -> None:
        """Plan the conversion of a model, which may be on the meta device; `names` are its tensors, by default all."""
        conversions = [
            c for c in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(c, PrefixChange)
        ]
        reverse = [conversion.reverse_transform() for conversion in reversed(conversions)]
        self._model, self._made_by = model, planned(names or model.state_dict(), reverse, reverse=True)
        self._targets = {source: target for target, (_, parts) in self._made_by.items() for _, source, _ in parts}
        self.differ = any(
            not isinstance(self._made_by[target][0], WeightRenaming) or target != source
            for source, target in self._targets.items()
        )
        """Whether any name or shape differs from the model's own."""

    def of(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the hub's tensors, each as soon as its source tensors have arrived."""
        come: dict[str, dict[str, Tensor]] = {}
        for source, tensor in tensors:
            target = self._targets[source]
            come.setdefault(target, {})[source] = tensor
            conversion, parts = self._made_by[target]
            if len(come[target]) == len(parts):
                yield from converted(self._model, conversion, parts, come.pop(target)).items()

    def parts(self, parts: Mapping[str, WeightPart]) -> dict[str, WeightPart] | None:
        """Return a rank's parts as parts of the hub's tensors, in the same memory.

        Returns None if a tensor of the hub is not a block of one of the model's, as when a conversion transposes.
        """
        of_hub: dict[str, WeightPart] = {}
        for name, part in parts.items():
            blocks = self.blocks_of(name, part.shape)
            if blocks is None:
                return None
            for target, shape, box in blocks:
                if box == Box.whole(part.shape) and shape == part.shape:
                    of_hub[target] = replace(part, names=[target])
                elif (overlap := box.overlap(part.box)) is not None:
                    # The hub's tensor lacks the leading stacking dimensions, such as that of experts.
                    lacking = len(box.sizes) - len(shape)
                    starts = [at - start for at, start in zip(overlap.offsets, box.offsets, strict=True)]
                    inner = Box(tuple(starts[lacking:]), overlap.sizes[lacking:])
                    of_hub[target] = part.renamed(target, overlap, torch.Size(shape), inner)
        return of_hub

    def blocks_of(self, name: str, shape: torch.Size) -> list[tuple[str, torch.Size, Box]] | None:
        """Return the hub's tensors made from a tensor: name, shape, and block of each; None if one is not a block.

        Found by converting a tensor of indices, one index for each position along all dimensions but the last.
        """
        conversion, parts = self._made_by[self._targets[name]]
        if isinstance(conversion, WeightRenaming):
            return [(self._targets[name], shape, Box.whole(shape))]
        if len(parts) > 1 or len(shape) < 2:
            return None
        leading = shape[:-1]
        numbers = torch.arange(leading.numel()).view(*leading, 1).expand(*leading, 2).contiguous()
        blocks = []
        for target, value in converted(self._model, conversion, parts, {name: numbers}).items():
            if value.dim() < 2 or value.shape[-1] != 2 or not torch.equal(value[..., 0], value[..., 1]):
                return None
            elements = value[..., 0].flatten()
            first = torch.unravel_index(elements[0], leading)
            sizes = (*(1,) * (len(shape) - value.dim()), *value.shape[:-1], shape[-1])
            box = Box((*(int(at) for at in first), 0), sizes)
            if not torch.equal(numbers[box.slices[:-1]][..., 0].flatten(), elements):
                return None
            blocks.append((target, torch.Size((*value.shape[:-1], shape[-1])), box))
        return blocks


def auto_class(config: Any) -> Any:
    """Return the class of transformers that loads a configuration as a language model with all of its parts.

    A multimodal model is loaded with all modalities, by the class that its folder names or by the only class that it
    has.
    """
    if config.model_type == "longcat_flash":
        keep_experts_with_weights()
    kinds = (AutoModelForImageTextToText, AutoModelForMultimodalLM)
    named = set(getattr(config, "architectures", None) or ())
    is_text = type(config) in AutoModelForCausalLM._model_mapping
    for auto in kinds:
        if type(config) in auto._model_mapping:
            composite = auto._model_mapping[type(config)]
            classes = composite if isinstance(composite, tuple) else (composite,)
            if not is_text or named & {kind_class.__name__ for kind_class in classes}:
                return auto
    return AutoModelForCausalLM


@cache
def keep_experts_with_weights() -> None:
    """Make transformers' LongCat-Flash stack only the experts that have weights, as the hub's files do.

    Its routers also choose experts that return their token; transformers 5.24 has rows for them in one of two stacks,
    and so refuses the files.
    """
    from transformers.models.longcat_flash import modeling_longcat_flash as modeling

    plain: Any = modeling.LongcatFlashExperts

    def build(self: Any, config: Any) -> None:
        plain.__init__(self, config)
        self.num_experts = config.n_routed_experts
        self.gate_up_proj = Parameter(self.gate_up_proj[: self.num_experts].detach().clone())

    modeling.LongcatFlashExperts = type(plain.__name__, (plain,), {"__init__": build, "__module__": plain.__module__})


def has_language_model(config: Any) -> bool:
    """Return False for a configuration of which transformers has no model that predicts the next token."""
    auto = auto_class(config)
    return type(config) in auto._model_mapping


def scorer_class(config: Any) -> Any:
    """Return the class of transformers that loads a configuration with a scalar head.

    Most multimodal types have none in transformers: it is built here from the same parts.
    """
    auto, kind = AutoModelForSequenceClassification, type(config)
    if kind not in auto._model_mapping and kind in AutoModelForImageTextToText._model_mapping:
        composite = AutoModelForImageTextToText._model_mapping[kind]
        base = next(parent for parent in composite.__mro__[1:] if issubclass(parent, PreTrainedModel))
        name = base.__name__.removesuffix("PreTrainedModel") + "ForSequenceClassification"
        # The module of its parts: transformers converts weights only for its own classes.
        members = {"__module__": base.__module__, "config_class": kind}
        # Otherwise transformers silently keeps its own types.
        auto.register(kind, type(name, (GenericForSequenceClassification, base), members), exist_ok=True)
    return auto


def model_in(folder: Path | str) -> Any:
    """Return the model of a Hugging Face directory on the meta device, without reading weights."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        return auto_class(config).from_config(config)


def shapes_in_folder(folder: Path | str) -> dict[str, torch.Size]:
    """Return the shape of every tensor of the model in a directory, a tied one under each of its names."""
    return {name: tensor.shape for name, tensor in model_in(folder).state_dict().items()}
