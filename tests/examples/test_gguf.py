"""A GGUF file is converted back to the directory that it was made from."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Qwen2Config

from braidrl.errors import UserError
from braidrl.runtimes.prepare.fetching import model_here
from examples.smollm2.fetch import Unavailable, convert

END = "<|end|>"
TOKENS = [*sorted(ByteLevel.alphabet()), "12", END]
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.layers.": "blk.",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(file: Path) -> PreTrainedModel:
    """Write a tiny Qwen2 with a tokenizer of bytes as a GGUF file; return the model."""
    config = Qwen2Config(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    writer = gguf.GGUFWriter(file, "qwen2")
    writer.add_block_count(2)
    writer.add_context_length(256)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_merges(["1 2"])
    writer.add_eos_token_id(len(TOKENS) - 1)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":
            for theirs, own in NAMES.items():
                name = name.replace(theirs, own)
            writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def test_the_directory_has_the_weights_and_the_tokenizer_of_the_file(tmp_path: Path) -> None:
    model, folder = write_gguf(tmp_path / "tiny.gguf"), tmp_path / "models" / "tiny"
    convert(tmp_path / "tiny.gguf", folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer.encode("12 + 7 = 19")) == "12 + 7 = 19" and tokenizer.chat_template


def test_a_file_that_is_not_a_model_is_refused_without_leftovers(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + b"\xff" * 64)
    with pytest.raises(Unavailable, match=r"bad.gguf .* read as a model"):
        convert(tmp_path / "bad.gguf", tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_run_refuses_a_gguf_file_and_names_the_script_that_converts_it() -> None:
    with pytest.raises(UserError, match=r"^roles\.critic\.model: m\.gguf .*fetch\.py --gguf m\.gguf"):
        model_here(Path("m.gguf"), "roles.critic.model", with_weights=True)
