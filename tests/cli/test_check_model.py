"""`braid check` proves a model from its config.json alone, and runs refuse what it refuses."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from braidrl.cli.check_model import check
from braidrl.errors import UserError
from braidrl.training.loading import check_model
from tests.engines.served import vllm_python


def written(folder: Path, kind: str, **settings: Any) -> Path:
    AutoConfig.for_model(kind, **settings).save_pretrained(folder)
    return folder / "config.json"


def test_hybrid_is_proven_from_its_configuration_alone(tmp_path: Path) -> None:
    lines: list[str] = []
    assert check(str(written(tmp_path, "qwen3_5_text")), False, lines.append)
    assert "Qwen3_5GatedDeltaNet by rows" in lines[0]
    assert all(line.startswith("ok") for line in lines[1:])


def test_an_encoder_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    lines: list[str] = []
    assert not check(str(written(tmp_path, "bert")), False, lines.append)
    assert lines[-1].startswith("REFUSED")
    with pytest.raises(UserError, match="not proven to train correctly"):
        check_model(tmp_path)


def test_a_missing_model_is_a_user_error() -> None:
    with pytest.raises(UserError, match="no folder"):
        check("/nowhere/config.json", False, print)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "gpt_oss", "gemma4_text"])
def test_vllm_equals_the_trainer_before_and_after_an_update(kind: str, tmp_path: Path) -> None:
    lines: list[str] = []
    check(str(written(tmp_path, kind)), False, lines.append, vllm_python() or Path(sys.executable))
    assert lines[-1].startswith("ok      vLLM equals trainer")
