"""Models in the form that the hub has them train as text, and a checkpoint keeps every tensor of their folder."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from braidrl.config import parse_config
from braidrl.errors import UserError
from braidrl.runtimes.restarts import train
from braidrl.training.decoders.proof import Refusal, Twin, find_plan, quietly
from braidrl.training.decoders.shrink import shrink_config, tiny_model
from braidrl.training.loading import check_model, load_decoder
from braidrl.training.pretrained import read_model_config
from tests.cases import soak_but
from tests.invariants.traces import merged
from tests.tiny import TOKENIZER, Workshop, write_model
from tests.training.decoders.families import FLOWS, write_family, write_pairs

WRAPPED = {
    "gemma3": "Gemma3ForConditionalGeneration",
    "internvl": "InternVLForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "smolvlm": "SmolVLMForConditionalGeneration",
}
"""Types whose models also see, with the class that the hub's folders name."""
SECTIONS = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}


def write_wrapped(folder: Path, kind: str) -> Path:
    """Write a tiny random model with its vision tower, in the hub's names, with a tokenizer."""
    with quietly():
        settings = {"text_config": {"rope_parameters": SECTIONS}} if kind == "qwen2_5_vl" else {}
        config = shrink_config(AutoConfig.for_model(kind, architectures=[WRAPPED[kind]], **settings))
        for part in (config, config.get_text_config()):
            part.vocab_size, part.eos_token_id = len(TOKENIZER), TOKENIZER.eos_token_id
            part.pad_token_id, part.bos_token_id = TOKENIZER.pad_token_id, None
        for name in vars(config):
            if name.endswith(("token_id", "token_index")) and name not in (
                "eos_token_id",
                "pad_token_id",
                "bos_token_id",
            ):
                setattr(config, name, len(TOKENIZER) - 1)
        tiny_model(config).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


SUPERVISED = [("sft", kind) for kind in WRAPPED]


@pytest.mark.parametrize(
    ("flow", "kind"), soak_but([*SUPERVISED, ("grpo", "qwen3_5")], [*SUPERVISED, *(("grpo", kind) for kind in WRAPPED)])
)
def test_wrapped_model_trains_as_text_and_checkpoint_keeps_all_tensors(tmp_path: Path, flow: str, kind: str) -> None:
    folder = write_wrapped(tmp_path / "model", kind)
    file = folder / "model.safetensors"
    # Layers that predict several tokens, which transformers does not load.
    before = {**load_file(file), "mtp.fc.weight": torch.randn(3, 2), "mtp.layers.0.norm.weight": torch.ones(2)}
    save_file(before, file, {"format": "pt"})
    shop = Workshop(tmp_path, folder, write_pairs(tmp_path / "pairs.jsonl"))
    run = shop.run(flow, **merged(FLOWS[flow], {"trainer": {"steps": 1}}))
    checkpoint = run / "checkpoints" / "step-1" / "actor"
    after = load_file(checkpoint / "model.safetensors")
    assert {n: t.shape for n, t in after.items()} == {n: t.shape for n, t in before.items()}
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed and not any(part in name for name in changed for part in ("vision", "visual", "projector", "mtp"))
    settings = [json.loads((each / "config.json").read_text()) for each in (folder, checkpoint)]
    assert settings[0]["architectures"] == settings[1]["architectures"] and "vision_config" in settings[1]


@pytest.mark.parametrize("kind", ["bart", "marian", "pegasus"])
def test_model_without_parts_that_train_is_refused_in_a_line(kind: str) -> None:
    with quietly(), pytest.raises(Refusal, match="an encoder and a decoder"):
        find_plan(Twin(AutoConfig.for_model(kind)))


@pytest.mark.parametrize("kind", ["openai-gpt", "fuyu", "got_ocr2"])
def test_model_whose_parts_have_rare_names_trains(tmp_path: Path, kind: str) -> None:
    with quietly():
        plan, findings = find_plan(Twin(AutoConfig.for_model(kind)))
    assert all(finding.holds for finding in findings), plan


def write_settings(folder: Path, **settings: Any) -> Path:
    write_wrapped(folder, "mistral3")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return folder


@pytest.mark.parametrize(
    "own",
    [
        {"AutoModelForCausalLM": "modeling_mine.MineForCausalLM"},
        {"AutoModel": "mine.MineModel", "AutoConfig": "mine.MineConfig"},
        {"AutoModelForCausalLM": "org/code--modeling_mine.MineForCausalLM"},
    ],
)
def test_class_of_its_own_beside_a_known_type_is_refused(own: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Mine(Model|ForCausalLM).*auto_map") as refused:
        read_model_config(write_settings(tmp_path / "own", auto_map=own))
    assert "\n" not in str(refused.value)


def test_a_known_class_in_auto_map_is_named(tmp_path: Path, caplog: Any) -> None:
    known = {"AutoModelForCausalLM": "modeling_mistral.MistralForCausalLM"}
    with caplog.at_level(logging.WARNING):
        read_model_config(write_settings(tmp_path / "known", auto_map=known))
    assert "auto_map" in caplog.text


def test_unknown_type_says_which_version_is_installed(tmp_path: Path) -> None:
    folder = write_settings(tmp_path, model_type="no_such_model")
    with pytest.raises(UserError, match=r"transformers \d.*no_such_model"):
        load_decoder(folder)


def test_encoder_decoder_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    with quietly():
        tiny_bart = AutoConfig.for_model("bart", d_model=16, vocab_size=len(TOKENIZER), encoder_layers=1)
        tiny_bart.save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    save_file({"x": torch.ones(1)}, tmp_path / "model" / "model.safetensors")
    shop = Workshop(tmp_path, tmp_path / "model", write_pairs(tmp_path / "pairs.jsonl"))
    with pytest.raises(UserError, match="an encoder and a decoder"):
        train(parse_config(shop.tree("refused", **FLOWS["sft"])))


def test_a_type_with_attention_classes_of_its_own_is_sized_and_trains(tmp_path: Path) -> None:
    """Falcon looks its attention up in a table of its own, which has none of Braid's."""
    folder = write_family(tmp_path / "model", "falcon")
    shop = Workshop(tmp_path, folder, write_pairs(tmp_path / "pairs.jsonl"))
    run = shop.run("sft", **merged(FLOWS["sft"], {"trainer": {"steps": 1}}))
    assert (run / "checkpoints" / "step-1" / "actor" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("kind", "listed"), [("qwen2_5_vl", "fullatt_block_indexes"), ("qwen3_vl", "deepstack_visual_indexes")]
)
def test_a_twins_tower_keeps_whole_windows_and_the_blocks_that_are_listed(kind: str, listed: str) -> None:
    tower = shrink_config(AutoConfig.for_model(kind)).vision_config
    assert getattr(tower, listed) == [tower.depth - 1]
    assert getattr(tower, "window_size", 0) % (tower.patch_size * tower.spatial_merge_size) == 0


def test_a_type_without_a_language_model_and_one_of_unknown_code_say_what_to_do(tmp_path: Path) -> None:
    with quietly(), pytest.raises(Refusal, match="no class of this type that predicts the next token"):
        find_plan(Twin(AutoConfig.for_model("clip")))
    (tmp_path / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}')
    with pytest.raises(UserError, match=r"no model_type 'own', and Braid runs no code beside a model"):
        read_model_config(tmp_path)


def test_a_folder_that_names_a_class_of_another_type_gets_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_model(tmp_path, "qwen3")
    settings = json.loads((folder / "config.json").read_text())
    check_model(folder)
    assert not caplog.records
    (folder / "config.json").write_text(json.dumps({**settings, "architectures": ["LlamaForCausalLM"]}))
    check_model(folder)
    assert "LlamaForCausalLM" in caplog.text and "qwen3 decides" in caplog.text
