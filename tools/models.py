"""`make models`: write docs/models.md, one line for each causal model type of the installed transformers.

Each type is shrunk to a tiny model, as in `braid check`, and measured. A type that holds is then used as a user would:
a folder with config.json, weights and tokenizer, a step of SFT and two of GRPO by the configuration of a run, the
export, and transformers' own class on it. `REAL` adds settings that the hub's models have
but a type's defaults lack. `NOT_NEUTRAL` changes scalings whose default of 1 would hide a missing scaling.
"""

import argparse
import copy
import math
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from braidrl.config import parse_config
from braidrl.data.vision import FAMILIES
from braidrl.errors import first_line
from braidrl.observe.metrics import read_metrics
from braidrl.runtimes.restarts import train
from braidrl.runtimes.saving.checkpoints import export_model
from braidrl.training.acceptance import ADAPTERS, AXES, HALF, MEASURES, OPTIONAL, all_findings, layout_findings
from braidrl.training.decoders.image_proof import image_finding
from braidrl.training.decoders.proof import FAILURES, Refusal, Twin, best_plan, quietly
from braidrl.training.decoders.routing import experts_in
from braidrl.training.decoders.shrink import shrink_config, tiny_model
from braidrl.training.processors import written_by
from braidrl.weights.model_files import auto_class

sys.path.insert(0, str(Path(__file__).parent.parent))  # the tests' tokenizer and flows

from tests.invariants.traces import merged
from tests.tiny import TOKENIZER
from tests.training.decoders.families import FLOWS, write_pairs

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
PROCESSES = 2
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "threads": 1,
    "reward": {"verify": "gsm8k", "sandbox": "none"},
    "evaluation": {"every": 0},
    "rollout": {"samples_per_prompt": 2, "max_response_tokens": 8, "slots": 16},
}
LIMIT_S = 600
CONVOLUTIONS = ["conv", "full_attention", "conv", "full_attention"]
SOUND = {"text_encoder": {"model_type": "t5"}, "audio_encoder": {"model_type": "encodec"}}
SELECTED = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
    "ple_layer_ids": [1],
    "eos_token_id": 1,
    "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.25},
}
DRAFTER = {
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "enable_moe_block": False,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 4,
}
PARTLY = {
    "text_config": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "mrope_section": [8, 12, 12],
        }
    }
}
SECTIONS = {
    "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}}
}
COMPASS = {"full_attention": {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [22, 22, 20]}}
REAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "paddleocr_vl"), SECTIONS),
    "hunyuan_vl": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 16, 16, 16]}},
    "step3p7": {"text_config": {"sliding_window": 512}},
    "gemma4": {"vision_config": {"model_type": "gemma4_vision"}},
    "gemma4_unified": {"vision_config": {"model_type": "gemma4_unified_vision"}},
    "exaone4_5": {"text_config": {"model_type": "exaone4"}},
    "cohere_compass": {"text_config": {"rope_parameters": COMPASS}},
    **dict.fromkeys(("glm4v", "glm46v", "glm4v_moe", "glm_ocr"), PARTLY),
    "lfm2": {"layer_types": CONVOLUTIONS, "num_hidden_layers": 4},
    "lfm2_moe": {"layer_types": CONVOLUTIONS, "num_hidden_layers": 4},
    "nemotron": {"num_key_value_heads": 8},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 2},
    "gemma4_text": {"num_kv_shared_layers": 10},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 8},
    "cohere_compass_text": {"rope_parameters": COMPASS},
    "dbrx": {"attn_config": {"kv_n_heads": 8, "clip_qkv": 8, "rope_theta": 500_000}},
    "musicgen": SOUND | {"decoder": {"model_type": "musicgen_decoder"}},
    "musicgen_melody": SOUND | {"decoder": {"model_type": "musicgen_melody_decoder"}},
    "gemma4_assistant": {"text_config": DRAFTER | {"model_type": "gemma4_text"}},
    "gemma4_unified_assistant": {"text_config": DRAFTER | {"model_type": "gemma4_unified_text"}},
    "qwen4_exp": {"text_config": SELECTED},
    "qwen4_exp_text": SELECTED,
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2},
    "xmod": {"default_language": "en_XX"},
    "youtu": {"pad_token_id": None},
    "emu3": {"architectures": ["Emu3ForConditionalGeneration"], "vocabulary_map": {"<image>": 5}},
    "mllama": {"architectures": ["MllamaForConditionalGeneration"]},
}
"""Settings of the hub's models that a type's defaults lack."""
PROCESSORS = {"fast_vlm": "LlavaProcessor", "glm_ocr": "Glm46VProcessor"}
"""Classes of processors that the hub's folders name, for types for which transformers names none."""
NOT_NEUTRAL = ("_multiplier", "logits_scaling")
PREAMBLE = """# Models

The model types of transformers {version} that train correctly, measured by `make models` on a CPU: {right} of {total}.
Of the 178 types of transformers 5.19.0, 141 do.
Every type is shrunk to a tiny random model of the same structure. Its packed rows are compared with each row alone by
transformers' own forward (log-probs to {bound:.0e}, gradients), decoded in the embedded engine, saved, read by parts
and resumed; then a folder of it is trained by SFT and GRPO, exported, and loaded by transformers. A type that fails is
refused before its weights are read, with the reason given here. A new type is refused until it passes the same proof.
`braid check MODEL` runs the proof for your own `config.json`, shows the figures, and names switches of the
configuration that change nothing in the tiny model (`unseen`): of them the proof says nothing.

* **packed**: rows go through the model without padding, in one forward pass.
* **mixers**: packed as well, but linear attention, convolutions and state-space layers run once for each length, over
  rows of that length.
* **by rows**: the whole model runs once for each length, with transformers' own attention; layouts other than
  `data` and, of mixtures, `expert` are refused.
* **not**: features that are refused: the axes `pipeline`, `tensor` and `expert`, `adapters`, `bfloat16`. `engine`
  means that the embedded engine is refused; training on given rows (SFT, DPO, reward models) works. For Zamba 2 and
  Nemotron H, transformers' form for one token leaves out the lower limit of the time step, which its form for many
  tokens has.

A model that also sees or hears (Gemma 3, Mistral 3, Qwen-VL, Qwen3.5) trains on text, and on images where its type is
proven to see ([models that see](vision.md)). Its towers stay as they are, unless `trainer.train_vision` is true, and
a checkpoint keeps every tensor of the folder, also those that transformers does not load, such as layers that predict
several tokens.

Where the factors of a rope depend on a row's length (longrope of Phi-3.5 and Phi-4-mini, dynamic NTK), each row has
those that it has alone. The embedded engine draws a token with the factors of its row so far, and computes the row
again where they change; training computes the whole row with those of its end. Rows that cross the length need
`old=recompute`. vLLM computes every row with the factors of its longest row: keep rows within the length, which a
warning names.

| type | trains | not | what was found |
|---|---|---|---|
"""
SEEING = """
## Types that see

The image-text types of transformers {version} whose rows with images are trained and decoded right: {right} of {total},
measured by `make models ONLY=--seeing`. On the tiny twin random embeddings stand for encoded images. Packed rows with
several images, and rows decoded behind such a prompt, are compared with each row alone by transformers' own forward
(log-probs to {bound:.0e}). Where the tokens of an image see each other in both directions, as in Gemma 3, packed rows
do the same. A type that does not see trains as text. See [models that see](vision.md).

| type | sees | what was found |
|---|---|---|
"""
EXPERTS = """
## Types with experts

The causal types of transformers {version} whose layers have experts, on two ranks that share them
(`trainer.layout.expert=2`, `make models ONLY=--experts`): {right} of {total} compute log-probs and the gradient norm of
one process, to {bound:.0e}. See [mixtures](moe.md). `braid check --layouts` runs the same for your own `config.json`.

| type | expert 2 | what was found |
|---|---|---|
"""


@dataclass(frozen=True)
class Part:
    """A table of the page: its types, the function that makes a type's line, and the text before the lines."""

    types: Callable[[], Iterable[str]]
    line: Callable[[str], tuple[bool, str]]
    head: str
    at_once: bool = True
    """Whether processes measure several types at once; not where each starts ranks of its own."""


def main() -> None:
    """Measure the given types, or all, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--seeing", action="store_true", help="measure image-text types with images instead")
    parser.add_argument("--experts", action="store_true", help="measure types with experts on two ranks instead")
    given = parser.parse_args()
    name = "seeing" if given.seeing else "experts" if given.experts else "trained"
    part = PARTS[name]
    every = sorted(part.types())
    types, start, lines = given.types or every, time.perf_counter(), {}
    for type_name, line in measured(types, part):
        lines[type_name] = line
        print(line[1], flush=True)
    right = sum(good for good, _ in lines.values())
    minutes = (time.perf_counter() - start) / 60
    print(f"{right} of {len(lines)} hold, {minutes:.1f} minutes")
    if len(types) == len(every):
        head = part.head.format(version=transformers.__version__, right=right, total=len(lines), bound=2e-4)
        write_part(name, head + "\n".join(line for _, line in lines.values()) + "\n")


def measured(types: list[str], part: Part) -> Iterator[tuple[str, tuple[bool, str]]]:
    """Yield each type with whether it holds, and its line."""
    if not part.at_once:
        yield from ((name, part.line(name)) for name in types)
        return
    with multiprocessing.get_context("spawn").Pool(PROCESSES, maxtasksperchild=12) as pool:
        waiting = {name: pool.apply_async(part.line, (name,)) for name in types}
        for name, result in waiting.items():
            try:
                yield name, result.get(LIMIT_S)
            except multiprocessing.TimeoutError:
                empty = " |" if part.line is row_of else ""
                yield name, (False, f"| {name} | no |{empty} takes longer than {LIMIT_S} s |")


def write_part(name: str, text: str) -> None:
    """Replace one table of the page, whose parts are in the order of PARTS."""
    parts, rest = dict.fromkeys(PARTS, ""), PAGE.read_text()
    for other in reversed(PARTS):
        title = PARTS[other].head.splitlines()[1] if other != "trained" else ""
        before, mark, after = rest.partition(f"\n{title}\n") if title else ("", "", rest)
        if not title or mark:
            parts[other], rest = mark + after, before
    PAGE.write_text("".join((parts | {name: text}).values()))


def expert_types() -> Iterator[str]:
    """Yield the causal types whose layers have experts."""
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        with suppress(*FAILURES), quietly():
            if experts_in(configuration(name)):
                yield name


def experts_of(name: str) -> tuple[bool, str]:
    """Return whether two ranks share a type's experts right, and its line of the page."""
    torch.set_num_threads(1)
    try:
        with quietly():
            twin = Twin(configuration(name))
            plan, _ = best_plan(twin)
            (finding,) = layout_findings(twin, plan, ["expert 2"])
    except Refusal as refusal:
        return False, f"| {name} | no | {cell(str(refusal))} |"
    except FAILURES as error:
        return False, f"| {name} | no | {cell(first_line(error))} |"
    if finding.holds:
        return True, f"| {name} | yes | differs by {finding.value:.0e} |"
    return False, f"| {name} | no | {cell(finding.note or f'differs by {finding.value:.1g}')} |"


def row_of(name: str) -> tuple[bool, str]:
    """Return whether a model type trains right, and its line of the page."""
    torch.set_num_threads(1)
    try:
        with quietly():
            plan, findings = all_findings(Twin(configuration(name)))
    except Refusal as refusal:
        return False, f"| {name} | no | | {cell(str(refusal))} |"
    except FAILURES as error:
        return (
            False,
            f"| {name} | no | | {cell(f'transformers computes no tiny model of its structure: {first_line(error)}')} |",
        )
    engine, wrong = findings[-len(MEASURES) - 1], [finding for finding in findings if not finding.holds]
    if worst := next((f for f in wrong if f.name not in OPTIONAL and f is not engine), None):
        return False, f"| {name} | no | | {cell(f'{worst.name}: {worst.note or worst.value}')} |"
    lacks = {
        **{name: axis for axis, name in AXES.items()},
        ADAPTERS: "adapters",
        HALF: "bfloat16",
        engine.name: "engine",
    }
    try:
        with quietly(), tempfile.TemporaryDirectory() as folder:
            use(name, Path(folder), generates=engine.holds)
    except FAILURES as error:
        return False, f"| {name} | no | | {cell(f'used by its folder: {first_line(error)}')} |"
    figure = max(f.value for f in findings[:4])
    kind = "by rows" if plan.by_rows else "mixers" if plan.mixers else "packed"
    without = ", ".join(lacks[f.name] for f in wrong)
    return True, f"| {name} | {kind} | {without} | {plan}; differs by {figure:.0e} |"


def sight_of(name: str) -> tuple[bool, str]:
    """Return whether rows with images are right for an image-text type, and its line of the page."""
    torch.set_num_threads(1)
    try:
        with quietly():
            config = configuration(name)
            config.architectures = [MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[name]]
            twin = Twin(config)
            if name not in FAMILIES:
                written_by(twin.config, PROCESSORS.get(name))
            plan, _ = best_plan(twin)
            finding, mutual = image_finding(twin, plan)
    except Refusal as refusal:
        return False, f"| {name} | no | {cell(str(refusal))} |"
    except FAILURES as error:
        return False, f"| {name} | no | {cell(first_line(error))} |"
    if finding.holds:
        how = ", images see each other" if mutual else ""
        return True, f"| {name} | yes | {plan}{how}; differs by {finding.value:.0e} |"
    return False, f"| {name} | no | {cell(finding.note or f'log-probs differ by {finding.value:.1g}')} |"


def use(name: str, folder: Path, generates: bool) -> None:
    """Train a type from a folder, export it, and run the export by transformers. Raises whatever goes wrong."""
    config = shrink_config(configuration(name))
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        part.vocab_size, part.eos_token_id = len(TOKENIZER), TOKENIZER.eos_token_id
        part.bos_token_id = TOKENIZER.eos_token_id
        part.pad_token_id = REAL.get(name, {}).get("pad_token_id", TOKENIZER.pad_token_id)
        if getattr(part, "unpadded_vocab_size", None):
            part.unpadded_vocab_size, part.vocab_size = len(TOKENIZER), len(TOKENIZER) + 4
    tiny_model(config).save_pretrained(folder / "model")
    TOKENIZER.save_pretrained(folder / "model")
    data = write_pairs(folder / "pairs.jsonl")
    for flow in ("sft", "grpo") if generates else ("sft",):
        changed = {"output": str(folder), "name": flow, "data": {"train": str(data)}, "dtype": "float32"}
        settings = merged(FLOWS[flow], {"trainer": {"steps": 2 if flow == "grpo" else 1}})
        run = train(parse_config(merged(merged(SETTINGS, settings), {**changed, "model": str(folder / "model")})))
        lines = read_metrics(run)
        assert all(math.isfinite(line["actor/grad_norm"]) for line in lines), f"{flow}: {lines}"
    export_model(run, folder / "export")
    model: Any = auto_class(config).from_pretrained(folder / "export")
    logits = model(input_ids=torch.arange(2, 9)[None], use_cache=False).logits
    assert bool(logits.isfinite().all()), "the export gives no finite logits"


def configuration(name: str) -> Any:
    """Return a type's configuration with the settings of the hub's models."""
    config = AutoConfig.for_model(name, **copy.deepcopy(REAL.get(name, {})))
    for key in list(vars(config)):
        if key.endswith(NOT_NEUTRAL) and getattr(config, key) == 1.0:
            setattr(config, key, 1.25)
    return config


def cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())[:200]


PARTS = {
    "trained": Part(lambda: MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, row_of, PREAMBLE),
    "experts": Part(expert_types, experts_of, EXPERTS, at_once=False),
    "seeing": Part(lambda: MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, sight_of, SEEING),
}
"""The tables of the page in their order."""


if __name__ == "__main__":
    main()
