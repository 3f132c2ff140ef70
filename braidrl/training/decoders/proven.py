"""The cache of proven plans on this machine, by configuration, transformers version and code of the proof."""

import hashlib
import importlib.util
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from braidrl.errors import UserError, first_line
from braidrl.native.building import cache_folder
from braidrl.training.compute import attention
from braidrl.training.decoders.body import ForwardPlan
from braidrl.training.decoders.proof import (
    FAILURES,
    Finding,
    Refusal,
    Twin,
    decoding_finding,
    find_plan,
    packed_findings,
    quietly,
)  # fmt: skip

KNOWN: dict[str, dict[str, Any]] = {}
UNNAMED = (
    "_name_or_path", "dtype", "torch_dtype", "transformers_version", "_attn_implementation", "num_labels", "id2label", "label2id",
)  # fmt: skip
"""Settings that do not affect a model's structure."""


def proven_plan(config: Any, folder: Path | str, decodes: bool = False) -> ForwardPlan:
    """Return the proven forward plan of a configuration, measured once on this machine; messages name its `folder`.

    Raises UserError if no plan is proven correct, and with `decodes` if the embedded engine does not compute the trainer's log-probs.
    """

    def measured() -> dict[str, Any]:
        try:
            with quietly(), torch.enable_grad():  # a checkpoint may be loaded under no_grad
                plan, decoding = best_plan(Twin(config, device=proof_device()))
        except Refusal as refusal:
            return {"refused": str(refusal)}
        except FAILURES as error:
            return {"refused": f"a tiny model of its structure cannot be loaded: {first_line(error)}"}
        why = "" if decoding.holds else decoding.note or f"log-probs differ by {decoding.value:.1g}"
        return {"mixers": plan.mixers, "by_rows": plan.by_rows, "decoding": why}

    found = remembered(config, "decoder", measured)
    if "refused" in found:
        raise UserError(f"model: {folder}, {config.model_type}, is not proven to train correctly: {found['refused']}")
    if decodes and (why := found["decoding"]):
        raise UserError(f"model: {folder}, {config.model_type}, is not proven to decode in the embedded engine: {why}")
    return ForwardPlan(tuple(found["mixers"]), found["by_rows"])


def remembered(config: Any, about: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what this machine has measured of a configuration, or measure it and keep it."""
    settings = {name: value for name, value in config.to_dict().items() if name not in UNNAMED}
    # A proof also depends on transformers and on the code that proves.
    folder = Path(__file__).parent
    files = sorted([*folder.glob("*.py"), folder.with_name("acceptance.py"), Path(attention.__file__)])
    code = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    text = json.dumps(settings, sort_keys=True, default=str) + transformers.__version__ + code + proof_device()
    key = f"{about}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"
    if key not in KNOWN:
        path = cache_folder() / f"{key}.json"
        try:
            known = json.loads(path.read_text())
        except (OSError, ValueError):
            known = measure()
            # Written atomically: several processes may prove a model at once.
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=path.parent)
            with os.fdopen(handle, "w") as file:
                json.dump(known, file)
            os.replace(name, path)
        KNOWN[key] = known
    return KNOWN[key]


def proof_device() -> str:
    """Return CUDA where transformers would use kernels that compute only there, else the CPU."""
    return "cuda" if torch.cuda.is_available() and importlib.util.find_spec("fla") else "cpu"


def best_plan(twin: Twin) -> tuple[ForwardPlan, Finding]:
    """Return the first plan that trains correctly, preferring one that also decodes, with its decoding finding."""
    plan, _ = find_plan(twin)
    decoding = decoding_finding(twin, plan)
    rows = ForwardPlan(by_rows=True)
    if not decoding.holds and not plan.by_rows:
        other = decoding_finding(twin, rows)
        if other.holds and all(finding.holds for finding in packed_findings(twin, twin.model(rows))):
            return rows, other
    return plan, decoding
