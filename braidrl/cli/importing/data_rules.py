"""Rules of `braid import-config` for data, verifiers and reward models."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from braidrl.cli.importing.imported import MOST_COUNTED, UNSET, Decide, Imported


def paths(imported: Imported, value: Any, to: str) -> Any:
    """Return paths of data, which may be a list or text with commas; weights are the probabilities."""
    listed = value if isinstance(value, list) else [part for part in str(value).split(",") if part]
    weights = str(imported.get("prompt_data_probs", "dataset_probs", default="")).split(",")
    if len(weights) == len(listed) > 1:
        return [{"path": str(path), "weight": float(weight)} for path, weight in zip(listed, weights, strict=True)]
    return [str(path) for path in listed] if len(listed) > 1 else str(listed[0])


def eval_sets(imported: Imported, value: Any, to: str) -> Any:
    listed = [str(path) for path in (value if isinstance(value, list) else str(value).split(","))]
    names = [Path(path).stem for path in listed]
    if len(set(names)) < len(names):
        names = [f"{name}_{number}" for number, name in enumerate(names)]
    return dict(zip(names, listed, strict=True))


def named_sets(imported: Imported, value: Any, to: str) -> Any:
    """Return held-out sets from a text NAME PATH NAME PATH."""
    words = [str(word) for word in value] if isinstance(value, list) else str(value).split()
    if len(words) % 2:
        return Decide("data.eval is {NAME: PATH}")
    return dict(zip(words[::2], words[1::2], strict=True))


def of_source(imported: Imported, value: Any, to: str) -> Any:
    """Set a key of every source of `data.train` and `data.eval`."""
    name = to.rpartition(".")[2]
    if value in (*UNSET, None):
        return None
    if name == "prompt_field" and value == "prompt":
        return imported.together.append("data.train")  # Braid's own name

    def with_key(entry: Any) -> Any:
        return {**(entry if isinstance(entry, dict) else {"path": entry}), name: value}

    train, held_out = imported.converted.get("data.train"), imported.converted.get("data.eval")
    if train is not None:
        imported.converted["data.train"] = [
            with_key(entry) for entry in (train if isinstance(train, list) else [train])
        ]
    if isinstance(held_out, dict) and name not in ("first", "subset", "split"):
        imported.converted["data.eval"] = {key: with_key(entry) for key, entry in held_out.items()}
    return None if train is not None else Decide("data.train names no file")


VERIFIERS: Mapping[str, tuple[str, ...]] = {
    "gsm8k": ("openai/gsm8k",),
    "math": (
        "lighteval/MATH",
        "DigitalLearningGmbH/MATH-lighteval",
        "HuggingFaceH4/MATH-500",
        "math_dapo",
        "math",
        "math_dapo_reasoning",
        "aime",
        "numina",
        "hiyouga/geometry3k",
    ),
    "code": ("codecontests", "apps", "codeforces", "taco"),
    "exact": ("searchR1_",),
}
"""Verifiers by verl's `data_source`, or its beginning."""


def verifier_of(source: str) -> str | None:
    """Return the verifier of verl's reward function for a `data_source`; None if verl has none."""
    exact = (name for name, sources in VERIFIERS.items() if source in sources)
    begins = ("aime", "numina", "searchR1_")
    started = (name for name, sources in VERIFIERS.items() if any(source.startswith(b) for b in begins if b in sources))
    return next(exact, None) or next(started, None)


def sources_in(path: Path) -> Counter[str] | None:
    """Count the rows of a data file by `data_source`; None if the file is not here or lacks the field."""
    if not path.is_file():
        return None
    if path.suffix == ".parquet":
        import pyarrow.parquet

        if "data_source" not in pyarrow.parquet.read_schema(path).names:
            return None
        column = pyarrow.parquet.read_table(path, columns=["data_source"])["data_source"]
        return Counter(map(str, column.to_pylist()))
    if path.suffix != ".jsonl" or path.stat().st_size > MOST_COUNTED:
        return None
    with path.open(encoding="utf-8") as file:
        records = [json.loads(line) for line in file if line.strip()]
    named = [str(row["data_source"]) for row in records if isinstance(row, dict) and "data_source" in row]
    return Counter(named) if named else None


def verified(imported: Imported, entry: Any) -> list[Any]:
    """Split a data source by verl's reward functions for its rows: one entry for each verifier that its rows need."""
    path = Path(str(entry["path"] if isinstance(entry, dict) else entry)).expanduser()
    counts = sources_in(path if path.is_absolute() else imported.folder / path)
    if counts is None:
        guesses = {name: verifier_of(name) or verifier_of(f"openai/{name}") for name in (path.stem, path.parent.name)}
        counts = Counter({name: 1 for name, verifier in guesses.items() if verifier})
        guess = next((verifier for verifier in guesses.values() if verifier), None)
        imported.advice["reward.verify"] = (
            f"{path} is not here to be read: "
            + (f"{guess} is a guess from its name" if guess else "`exact` is Braid's default")
            + "; verl chooses by each row's data_source"
        )
        return [{**(entry if isinstance(entry, dict) else {"path": str(entry)}), "verify": guess}] if guess else [entry]
    by_verifier: dict[str | None, list[str]] = {}
    for name in counts:
        by_verifier.setdefault(verifier_of(name), []).append(name)
    said = [f"{verifier} for rows of {', '.join(names)}" for verifier, names in by_verifier.items() if verifier]
    imported.chosen |= {"data_source": "; ".join(["reward.verify", *said])} if said else {}
    if unknown := by_verifier.pop(None, []):
        imported.advice["data_source"] = (
            f"verl has no function for rows of {', '.join(unknown)}; name a verifier for them"
        )
    base = entry if isinstance(entry, dict) else {"path": str(entry)}
    if len(by_verifier) == 1 and not unknown:
        return [{**base, "verify": next(iter(by_verifier))}]
    return [
        {**base, "where": {"data_source": names}, "verify": verifier, "weight": float(sum(counts[n] for n in names))}
        for verifier, names in by_verifier.items()
    ] or [entry]


def rewards_by_source(imported: Imported) -> None:
    """Set the verifiers that verl's default function chooses by the rows' `data_source`."""
    if "reward.verify" in imported.converted or imported.converted.get("algorithm.reward") == "score":
        return
    train = imported.converted.get("data.train")
    if train is not None:
        entries = [
            part for entry in (train if isinstance(train, list) else [train]) for part in verified(imported, entry)
        ]
        verifiers = [entry.get("verify") if isinstance(entry, dict) else None for entry in entries]
        if len(set(verifiers)) == 1 and verifiers[0]:
            imported.converted["reward.verify"] = verifiers[0]
            entries = [{key: part for key, part in entry.items() if key != "verify"} for entry in entries]
        short = [entry["path"] if isinstance(entry, dict) and len(entry) == 1 else entry for entry in entries]
        imported.converted["data.train"] = short[0] if len(short) == 1 and isinstance(short[0], str) else short
    for name, entry in (imported.converted.get("data.eval") or {}).items():
        sources = verified(imported, entry)
        if (
            len(sources) == 1
            and isinstance(sources[0], dict)
            and sources[0].get("verify") != imported.converted.get("reward.verify")
        ):
            imported.converted["data.eval"][name] = sources[0]


def verify(imported: Imported, value: Any, to: str) -> Any:
    for key in ("reward.custom_reward_function", "custom_reward_function"):
        if path := imported.get(f"{key}.path"):
            function = imported.get(f"{key}.name", default="compute_score")
            imported.converted["reward.verify"] = f"{path}:{function}"
            imported.advice[f"{key}.path"] = (
                f"rename the parameters of {function}: data_source to source, solution_str to response, ground_truth "
                "to answer, extra_info to metadata"
            )


def served(imported: Imported, value: Any, to: str) -> Any:
    """Return the verifier for OpenRLHF's `remote_rm_url`: a file with `reward_func`, or a server."""
    first = str(value).split(",")[0]
    if first.endswith(".py"):
        imported.advice["remote_rm_url"] = "reward_func(queries, prompts, labels) becomes reward_func(response, answer)"
        return f"{first}:reward_func"
    return {"name": "remote", "params": {"url": first}}


REWARDS = {
    "accuracy_reward": "math",
    "reasoning_accuracy_reward": "math",
    "accuracy": "math",
    "think_format_reward": {"name": "format", "params": {"pattern": "(?s)<think>(?!.*<think>).*</think>.*"}},
    "format": {"name": "format", "params": {"pattern": r"<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>"}},
}
"""Verifiers by the names of TRL's reward functions, and of open-r1's."""


def solution_column(imported: Imported) -> None:
    """Name the column of answers that TRL's and open-r1's reward functions for accuracy read."""
    named = imported.get("reward_funcs", default=[])
    names = named if isinstance(named, list) else [named]
    if any(REWARDS.get(str(name)) == "math" for name in names) and "data.train" in imported.converted:
        of_source(imported, "solution", "data.train.answer_field")


def reward_functions(imported: Imported, value: Any, to: str) -> Any:
    """Return the verifiers for TRL's reward functions, with their weights."""
    names, weights = value if isinstance(value, list) else [value], imported.get("reward_weights", default=[])
    verifiers = []
    for number, name in enumerate(names):
        verifier = REWARDS.get(str(name))
        if verifier is None and ":" in str(name):  # a function defined in the script
            verifier, function = str(name), str(name).rpartition(":")[2]
            imported.advice["reward_funcs"] = (
                f"{function}(completions, ...) becomes {function}(response, answer, metadata)"
            )
        if verifier is None and "." not in str(name):
            imported.advice["reward_funcs"] = (
                f"{name} is not written: a function of yours is file.py:function, called with response, answer and "
                "metadata; a penalty for length is algorithm.overlong_cache of flow=dapo"
            )
            continue
        if verifier is None:
            module, _, function = str(name).rpartition(".")
            verifier = f"{module}:{function}"
            imported.advice["reward_funcs"] = (
                f"{function}(completions, ...) becomes {function}(response, answer, metadata)"
            )
        entry = verifier if isinstance(verifier, dict) else {"name": verifier}
        verifiers.append({**entry, "weight": float(weights[number])} if number < len(weights) else entry)
    if not verifiers:
        return None
    return verifiers[0]["name"] if len(verifiers) == 1 and len(verifiers[0]) == 1 else verifiers


def mixture(imported: Imported, value: Any, to: str) -> Any:
    """Return the sources of TRL's `datasets`, or of the `dataset_mixture` of its recipes."""
    listed: Any = value["datasets"] if isinstance(value, dict) else value
    sources, lost = [], set[str]()
    for entry in listed if isinstance(listed, list) else [listed]:
        source = {MIXED.get(key, key): part for key, part in entry.items() if part is not None}
        lost |= source.keys() - {"path", "subset", "split", "weight"}
        sources.append({key: part for key, part in source.items() if key not in lost})
    if isinstance(value, dict):
        lost |= value.keys() - {"datasets", "seed"}
    if "weight" in lost | {key for source in sources for key in source}:
        imported.advice[imported.key] = "the sources are written; a weight is a share of the draws, and not of the rows"
    if lost:
        imported.advice[imported.key] = (
            f"the sources are written without {', '.join(sorted(lost))}; data.held_out counts rows for evaluation, and "
            "columns that nothing reads do no harm"
        )
    return sources


MIXED = {"id": "path", "name": "subset", "config": "subset"}
"""Braid's keys of a source by those of a mixture."""


def reward_model(imported: Imported, value: Any, to: str) -> Any:
    path = imported.get("reward.reward_model.model_path", "reward_model.model.path")
    if path and imported.get("reward.reward_model.enable", "reward_model.enable"):
        imported.converted |= {"algorithm.reward": "score", "roles.reward.model": path}
    elif imported.flow == "ppo":
        imported.converted["algorithm.reward"] = "verify"
