"""Fingerprints of a run's inputs: saved in each checkpoint, and compared on resume.

model, tokenizer, template, data, code ──digests──▶ state.json     --resume: digests now ─compare─▶ same, accepted, or a
UserError
"""

import hashlib
import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from braidrl.config import Config
from braidrl.errors import UserError
from braidrl.parsing import texts_and_numbers
from braidrl.runtimes.prepare.run_data import Prepared
from braidrl.runtimes.saving.folders import MAY_CHANGE
from braidrl.training.role_settings import settings_of

WHOLE_BYTES = 1 << 30
"""The size up to which a file is read whole; of a larger one its size and samples of its blocks count."""
BLOCKS, BLOCK_BYTES = 64, 1 << 20
Fingerprints = dict[str, dict[str, str]]
"""Digests by kind, then by the configuration key that names the file or folder."""


def fingerprints(prepared: Prepared) -> Fingerprints:
    """Return the fingerprints of a run's model, tokenizer, template, training data and user code."""
    config, tokenizer = prepared.config, prepared.tokenizer
    vocabulary = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else sorted(tokenizer.get_vocab().items())
    models = {"model": config.model}
    models |= {f"roles.{role}.model": settings_of(role, config).model for role in prepared.flow.roles}
    weights = {}
    for key, path in models.items():
        folder = path.expanduser()
        files = [*sorted(folder.glob("*.safetensors")), *sorted(folder.glob("pytorch_model*.bin"))]
        weights[key] = files_digest([folder / "config.json", *files])
    sources = {f"data.train.{number}": source for number, source in enumerate(config.data.train)}
    sources |= {"data.ptx": config.data.ptx} if config.data.ptx else {}
    data = {}
    for key, source in sources.items():
        below = sorted(file for file in source.path.rglob("*") if file.is_file())
        data[key] = files_digest(below if source.path.is_dir() else [source.path])
    template = [tokenizer.chat_template, config.data.chat_template, config.data.system_prompt]
    words = {"tokenizer": vocabulary, "template": template}
    digests = {
        kind: {"model": hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()}
        for kind, value in words.items()
    }
    code = {key: files_digest([path]) for key, path in code_files(config)}
    return {"model": weights, **digests, "data": data, "code": code}


def check_unchanged(
    saved: Mapping[str, Mapping[str, str]], now: Fingerprints, accepted: Sequence[str], step: int
) -> None:
    """Raise UserError if inputs of a kind that is not accepted have changed since the checkpoint of a step."""
    refused = dict[str, list[str]]()
    for kind, digests in now.items():
        before = saved.get(kind, {})
        changed = [key for key, digest in digests.items() if before.get(key, digest) != digest]
        if changed and kind not in accepted:
            refused[kind] = changed
    if refused:
        named = "; ".join(f"the {kind} of {', '.join(keys)}" for kind, keys in refused.items())
        raise UserError(
            f"since the checkpoint of step {step} something has changed that the run reads: {named}. Put it back, or "
            f"go on regardless with trainer.accept_changes=[{', '.join([*accepted, *refused])}]"
        )


def code_files(config: Config) -> Iterator[tuple[str, Path]]:
    """Yield the files of user functions and flows with their configuration keys.

    Keys that may change on resume are left out.
    """
    for key, text in texts_and_numbers(config.model_dump(mode="json")):
        if not isinstance(text, str) or key.startswith(MAY_CHANGE):
            continue
        name, _, function = text.removeprefix("agent:").rpartition(":")
        path = Path(text) if text.endswith((".yaml", ".yml")) else Path(name)
        if path.suffix in (".py", ".yaml", ".yml") and path.is_file():
            yield key, path
        elif name and function.isidentifier() and all(part.isidentifier() for part in name.split(".")):
            try:
                spec = importlib.util.find_spec(name)
            except (ImportError, ValueError, AttributeError):
                continue
            if spec and spec.origin and Path(spec.origin).is_file():
                yield key, Path(spec.origin)


def files_digest(files: list[Path]) -> str:
    """Return the digest of files, their names and their order; a missing file changes the digest too."""
    total = hashlib.blake2b(digest_size=16)
    for path in files:
        total.update(path.name.encode(errors="surrogateescape"))
        if not path.is_file():
            continue
        size = path.stat().st_size
        total.update(str(size).encode())
        with path.open("rb") as file:
            if size <= WHOLE_BYTES:
                total.update(hashlib.file_digest(file, "blake2b").digest())
                continue
            for block in range(BLOCKS):
                file.seek((size - BLOCK_BYTES) * block // (BLOCKS - 1))
                total.update(file.read(BLOCK_BYTES))
    return total.hexdigest()
