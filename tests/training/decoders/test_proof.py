"""A tiny twin of a decoder proves how its rows may be packed; with a fault put into it the right line fails."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaModel

from braidrl.training import acceptance
from braidrl.training.acceptance import AXES, MEASURES, accept
from braidrl.training.compute import slots
from braidrl.training.decoders import proof
from braidrl.training.decoders.body import PACKED, ForwardPlan
from braidrl.training.decoders.head import HEAD, Head
from braidrl.training.decoders.proof import (
    Refusal,
    Twin,
    decoding_finding,
    find_plan,
    leaking_modules,
    packed_findings,
    quietly,
    remembered,
    unexercised,
)
from braidrl.training.decoders.shrink import shrink_config, special_ids
from braidrl.weights.model_files import ModelFiles
from braidrl.weights.shards import full_tensor

LOG_PROBS = "packed rows equal rows alone: log-probs"
GRADIENTS = "packed rows equal rows alone: gradients"
DECODING = "embedded engine equals trainer: prefill and decode"
PLANS = {
    "qwen3": PACKED,
    "gpt_oss": PACKED,
    "deepseek_v3": PACKED,
    "gemma2": PACKED,
    "gemma4_text": PACKED,
    "stablelm": PACKED,
    "cohere2": PACKED,
    "phimoe": PACKED,
    "qwen3_5_text": ForwardPlan(("Qwen3_5GatedDeltaNet",)),
    "qwen3_next": ForwardPlan(("Qwen3NextGatedDeltaNet",)),
    "falcon_h1": ForwardPlan(("FalconH1Mixer",)),
    "granitemoehybrid": ForwardPlan(("GraniteMoeHybridMambaLayer",)),
    "bloom": ForwardPlan(by_rows=True),
}


def config_of(name: str, **settings: Any) -> Any:
    return AutoConfig.for_model(name, **settings)


@cache
def twin_of(name: str) -> Twin:
    """Return a correct twin with cached single-row results."""
    with quietly():
        return Twin(config_of(name))


@pytest.mark.parametrize("name", PLANS)
def test_plan_is_found_by_structure_and_engine_agrees_with_trainer(name: str) -> None:
    with quietly():
        plan, findings = find_plan(twin_of(name))
        decoding = decoding_finding(twin_of(name), plan)
    assert plan == PLANS[name]
    assert [finding for finding in (*findings, decoding) if not finding.holds] == []


@pytest.mark.parametrize("name", ["qwen3_5_text", "gpt_oss", "deepseek_v3"])
def test_new_families_are_saved_read_in_parts_and_adapted_exactly(name: str) -> None:
    with quietly():
        result = [accept(measure, twin_of(name), PLANS[name]) for measure in MEASURES]
    assert [f for f in result if not f.holds and (name, f.name) != ("gpt_oss", AXES["tensor"])] == []


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_encoder_is_refused_in_one_line(name: str) -> None:
    with quietly(), pytest.raises(Refusal, match="as in an encoder"):
        find_plan(Twin(config_of(name)))


def test_module_that_leaks_between_packed_rows_is_named() -> None:
    twin = twin_of("qwen3_next")
    with quietly():
        model = twin.model(PACKED)
        assert leaking_modules(twin, model)[0] == "Qwen3NextGatedDeltaNet"
        assert wrong_lines(twin, PACKED)[0] == LOG_PROBS


def wrong_lines(twin: Twin, plan: ForwardPlan) -> list[str]:
    with quietly():
        findings = [*packed_findings(twin, twin.model(plan)), decoding_finding(twin, plan)]
    return [finding.name for finding in findings if not finding.holds]


def each(model: Any, name: str) -> list[Any]:
    """Return the modules with this attribute."""
    result = [module for module in model.modules() if getattr(module, name, None) is not None]
    assert result
    return result


def without_scale(model: Any) -> None:
    setattr(model, HEAD, Head())


def without_cap(model: Any) -> None:
    for module in each(model, "attn_logit_softcapping"):
        module.attn_logit_softcapping = None


@torch.no_grad()
def without_sinks(model: Any) -> None:
    for module in each(model, "sinks"):
        module.sinks.fill_(-1e4)


def wider_window(model: Any) -> None:
    for module in each(model, "sliding_window"):
        module.sliding_window += 1


@torch.no_grad()
def experts_in_another_order(model: Any) -> None:
    for module in each(model, "down_proj"):
        if module.down_proj.__class__ is torch.nn.Parameter:
            module.down_proj.copy_(module.down_proj.flip(0))


def stale_buffer(model: Any) -> None:
    for module in each(model, "inv_freq"):
        module.inv_freq.mul_(1.3)


def lost_gradient(model: Any) -> None:
    model.get_input_embeddings().weight.register_hook(torch.zeros_like)


FAULTS: dict[str, tuple[str, Callable[[Any], None], str]] = {
    "a scale of the logits is left out": ("cohere2", without_scale, LOG_PROBS),
    "a soft cap of the scores is left out": ("gemma2", without_cap, LOG_PROBS),
    "sinks are left out": ("gpt_oss", without_sinks, LOG_PROBS),
    "a window is off by one": ("gemma2", wider_window, LOG_PROBS),
    "experts are in another order": ("gpt_oss", experts_in_another_order, LOG_PROBS),
    "a buffer is of another model": ("qwen3", stale_buffer, LOG_PROBS),
    "a gradient is lost": ("qwen3", lost_gradient, GRADIENTS),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_proof_finds_fault_in_the_model(fault: str) -> None:
    name, alter, line = FAULTS[fault]
    with quietly():
        twin = Twin(config_of(name), alter=alter)
    assert line == wrong_lines(twin, PLANS[name])[0]


def test_a_twin_has_groups_of_experts_and_widths_of_heads_that_its_type_computes_with() -> None:
    grouped, latent, odd = (
        shrink_config(config_of(name)) for name in ("bailing_hybrid", "dots3_note_text", "flex_olmo")
    )
    assert grouped.num_experts // grouped.num_expert_group == 2, "a router adds up the two best scores of a group"
    sliding = latent.per_layer_config["sliding_attention"]
    assert sliding.head_dim == sliding.qk_nope_head_dim + sliding.qk_rope_head_dim
    assert odd.num_experts % 2 == 0 and odd.num_experts > odd.num_experts_per_tok, "two ranks share them"


def test_proof_finds_state_that_does_not_move_with_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def move(self: Any, source: int, target: int, positions: int) -> None:
        states, self.states = self.states, []
        plain(self, source, target, positions)
        self.states = states

    plain = slots.SlotCache.move
    monkeypatch.setattr(slots.SlotCache, "move", move)
    assert wrong_lines(twin_of("qwen3_5_text"), PLANS["qwen3_5_text"]) == [DECODING]


def test_proof_is_measured_again_after_a_change_of_the_code_that_decodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(proof, "KNOWN", {})
    monkeypatch.setattr(proof, "code_digest", proof.code_digest.__wrapped__)
    measured: list[str] = []

    def measure() -> dict[str, Any]:
        measured.append("again")
        return {"refused": ""}

    config, read = config_of("qwen3"), Path.read_bytes
    for _ in range(2):
        remembered(config, "decoder", measure)
    monkeypatch.setattr(Path, "read_bytes", lambda file: read(file) + b"#" * (file.name == "slots.py"))
    remembered(config, "decoder", measure)
    assert len(measured) == 2


WHOLE = {"mixers": ["A"], "by_rows": False, "decoding": ""}
BROKEN = {
    "a list": "[]",
    "nothing": " ",
    "half an object": '{"mixers": [',
    "a number": "3",
    "other names": '{"plan": []}',
    "a name that lacks": '{"mixers": [], "by_rows": false}',
    "a text for a list": '{"mixers": "A", "by_rows": false, "decoding": ""}',
    "numbers for names": '{"mixers": [1], "by_rows": false, "decoding": ""}',
    "a bound that is NaN": '{"name": "a", "value": 0.0, "bound": NaN, "note": ""}',
    "deep lists": "[" * 100_000,
}


@pytest.mark.parametrize("kind", BROKEN)
def test_kept_proof_that_is_broken_is_measured_again(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured: list[str] = []

    def measure() -> dict[str, Any]:
        measured.append("again")
        return WHOLE

    for count, text in enumerate(("", BROKEN[kind], ""), start=1):
        monkeypatch.setattr(proof, "KNOWN", {})
        if text:
            (file,) = tmp_path.rglob("decoder-*.json")
            file.write_text(text)
        assert remembered(config_of("qwen3"), "decoder", measure) == WHOLE and len(measured) == min(count, 2)


@pytest.mark.parametrize("file", ["slots.py", "modeling_qwen3.py", "embedded_engine.py", "attention.c"])
def test_proof_depends_on_the_files_that_compute(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    read, config, measured = Path.read_bytes, config_of("qwen3"), list[str]()
    for ends in (b"", b"#"):
        for digest in ("code_digest", "model_digest"):
            monkeypatch.setattr(
                proof, digest, getattr(proof, digest).__wrapped__ if ends == b"" else getattr(proof, digest)
            )
        monkeypatch.setattr(proof, "KNOWN", {})
        monkeypatch.setattr(Path, "read_bytes", lambda path, ends=ends: read(path) + ends * (path.name == file))
        remembered(config, "decoder", lambda: (measured.append("again"), WHOLE)[1])
    assert len(measured) == 2


def test_check_finds_adapters_that_are_not_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "merged", lambda t: full_tensor(t.base if hasattr(t, "base") else t))
    with quietly():
        assert not accept("adapters equal merged weights", twin_of("qwen3"), PACKED).holds


def test_check_finds_weights_that_are_read_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ModelFiles.__getitem__
    monkeypatch.setattr(
        ModelFiles,
        "__getitem__",
        lambda self, name: plain(self, name).flip(0) if "experts" in name else plain(self, name),
    )
    with quietly():
        assert not accept("read in parts by file names, buffers rebuilt", twin_of("deepseek_v3"), PACKED).holds


def test_a_twins_rows_hold_the_special_tokens_of_its_configuration_apart() -> None:
    config = AutoConfig.for_model("mistral", bos_token_id=1, eos_token_id=[32001, 32007], pad_token_id=32007)
    twin = Twin(config)
    begin, *ends = special_ids(twin.config)
    assert begin == 1 and len(set(ends)) == 2 and twin.config.pad_token_id == ends[1]
    assert {int(row[-1]) for row in twin.rows} == {begin, *ends}
    assert max(int(row.max()) for row in twin.rows) < twin.config.vocab_size


def test_switches_that_a_tiny_model_cannot_show_are_named() -> None:
    config = AutoConfig.for_model("qwen2", use_sliding_window=True, max_window_layers=100)
    assert unexercised(config) == ["use_sliding_window"]
    assert unexercised(AutoConfig.for_model("llama", attention_bias=True)) == []


def test_a_decoder_whose_layers_are_in_several_lists_trains_without_pipeline_parallelism() -> None:
    with quietly():
        twin = Twin(config_of("hrm_text"))
        plan, findings = find_plan(twin)
        stages = accept("pipeline ranks equal one", twin, plan)
    assert all(finding.holds for finding in findings) and plan == PACKED
    assert "list of layers" in stages.note


def test_weights_that_transformers_changes_while_loading_are_refused_with_what_to_write() -> None:
    with quietly():
        # Youtu's class clears the row of the padding token at every load.
        cleared = accept(acceptance.FILES[1], twin := Twin(config_of("youtu", pad_token_id=1)), PACKED)
        kept = accept(acceptance.FILES[1], Twin(config_of("youtu", pad_token_id=None)), PACKED)
    assert "pad_token_id: null" in cleared.note and kept.holds
    assert bool((twin.reference.get_input_embeddings().weight != 0).any(-1).all())


def test_a_twin_keeps_an_output_layer_that_is_narrower_than_the_embedding() -> None:
    with quietly():
        twin = Twin(config_of("inkling2_text"))
        logits = twin.reference(input_ids=twin.rows[0][None], use_cache=False).logits
    assert logits.shape[-1] < twin.config.vocab_size and int(torch.cat(twin.rows).max()) < logits.shape[-1]


MIXED = {
    "qwen2_moe": {"decoder_sparse_step": 4, "mlp_only_layers": [3], "output_router_logits": True},
    "qwen3_moe": {"mlp_only_layers": [0, 1], "num_hidden_layers": 6},
    "qwen3_next": {"mlp_only_layers": [0, 1, 2, 3], "decoder_sparse_step": 1},
    "ernie4_5_moe": {"moe_layer_start_index": 1, "moe_layer_end_index": 2, "num_hidden_layers": 4},
    "glm4_moe": {"first_k_dense_replace": 3},
}
"""Mixtures of which some layers are dense."""


@pytest.mark.parametrize("name", MIXED)
def test_the_twin_of_a_mixture_with_dense_layers_has_both_and_trains(name: str) -> None:
    with quietly():
        twin = Twin(config_of(name, **MIXED[name]))
        plan, findings = find_plan(twin)
    layers = [set(dict(layer.named_modules())) for layer in twin.reference.model.layers]
    assert {"mlp.experts" in modules for modules in layers} == {True, False}
    assert plan == PLANS.get(name, PACKED) and all(finding.holds for finding in findings)


class BlocksConfig(LlamaConfig):
    model_type = "blocks_of_a_test"
    attention_block: int = 4096
    attention_span: int = 4096
    segment_len: int = 4096
    """Positions of a block; the least of the three counts."""


class BlocksModel(LlamaModel):
    """A decoder whose tokens see, beside attention, the mean of the block of positions before theirs."""

    def forward(self, input_ids: Any = None, position_ids: Any = None, inputs_embeds: Any = None, **more: Any) -> Any:
        settings = self.config
        size = min(settings.attention_block, settings.attention_span, settings.segment_len)
        states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        blocks = states.split(size, dim=1)
        before = [torch.zeros_like(blocks[0]), *(block.mean(1, keepdim=True).expand_as(block) for block in blocks[:-1])]
        states = states + torch.cat(before, dim=1)[:, : states.shape[1]]
        return super().forward(inputs_embeds=states, position_ids=position_ids, **more)


class BlocksForCausalLM(LlamaForCausalLM):
    config_class = BlocksConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = BlocksModel(config)


AutoConfig.register(BlocksConfig.model_type, BlocksConfig)
AutoModelForCausalLM.register(BlocksConfig, BlocksForCausalLM)


@pytest.mark.parametrize("name", ["attention_block", "attention_span", "segment_len"])
def test_blocks_of_positions_that_end_before_a_row_does_are_seen(name: str) -> None:
    config = BlocksConfig(**{name: 128})
    with quietly():
        findings = packed_findings(twin := Twin(config), twin.model(PACKED))
        plan, by_rows = find_plan(twin)
    assert findings[0].name == LOG_PROBS and not findings[0].holds
    assert plan == ForwardPlan(by_rows=True) and all(finding.holds for finding in by_rows)
