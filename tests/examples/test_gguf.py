"""A model in a GGUF file is trained as the directory would be that it was made of."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Qwen2Config

from braidrl.errors import UserError
from braidrl.runtimes.run import train
from braidrl.training.gguf import from_gguf
from tests.tiny import Workshop

END = "<|end|>"
TOKENS = [*sorted(ByteLevel.alphabet()), "12", END]
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "model.layers.": "blk.", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write_gguf(file: Path) -> PreTrainedModel:
    """Write a tiny Qwen2 with a tokenizer of bytes as a GGUF file; return the model."""
    config = Qwen2Config(
        vocab_size=len(TOKENS), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True,
    )  # fmt: skip
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


def test_the_directory_has_the_files_weights_and_tokenizer_and_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = write_gguf(tmp_path / "tiny.gguf")
    folder = from_gguf(tmp_path / "tiny.gguf", "model")
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer.encode("12 + 7 = 19")) == "12 + 7 = 19" and tokenizer.chat_template
    made = (folder / "config.json").stat().st_mtime_ns
    assert from_gguf(tmp_path / "tiny.gguf", "model") == folder
    assert (folder / "config.json").stat().st_mtime_ns == made


def test_a_run_takes_the_file_as_its_model(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(workshop.folder / "cache"))
    write_gguf(workshop.folder / "tiny.gguf")
    run = train(workshop.config(model=str(workshop.folder / "tiny.gguf"), trainer={"steps": 1}))
    assert (run / "checkpoints" / "latest").is_file()


def test_what_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^model: there is no file .*none.gguf; give the path of a GGUF file"):
        from_gguf(tmp_path / "none.gguf", "model")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + b"\xff" * 64)
    with pytest.raises(
        UserError, match=r"^roles\.critic\.model: [^\n]*bad.gguf cannot be read as a model [^\n]*; give one of[^\n]*$"
    ):
        from_gguf(tmp_path / "bad.gguf", "roles.critic.model")
