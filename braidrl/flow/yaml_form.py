"""The YAML form of a flow. It loads to the same `Flow` object as the Python form.

flow: grpo
stages:
- {role: actor, type: generate}
- {role: reward, type: verify}
- {id: baseline, type: my_algorithms.py:median_baseline, params: {floor: 0.1}}
- role: actor
  type: update
  params: {loss: {name: clip, low: 0.2}}
  after: [reward.verify]
  when: {every: 1, from: 11, until: 100}

`id` is the stage's name; the default is its role and type. A function's file is searched first in the YAML file's
folder, then in the current folder.
"""

import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from braidrl.config.reading import found_beside
from braidrl.errors import UserError, located, suggest
from braidrl.flow.flow import Flow
from braidrl.flow.stage import ALWAYS, Stage, When, default_name
from braidrl.flow.stages import make_stage
from braidrl.importing import relative_to
from braidrl.parsing import parse_yaml, read_text, texts_and_numbers

FLOW_KEYS = ("flow", "stages")
STAGE_KEYS = ("id", "role", "type", "params", "after", "when")
WHEN_KEYS = {"every": "every", "from": "start", "until": "until"}
SUFFIXES = (".yaml", ".yml")


class _Loader(yaml.SafeLoader):
    """A YAML loader that reads `1e-6` as a number."""


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that quotes a text such as "1e-6", and writes no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
    )


def from_yaml(source: str | Path) -> Flow:
    """Load a flow from a YAML text or a YAML file. Raises UserError, which names the file and the stage."""
    text, origin, folder = str(source), "flow", Path()
    if isinstance(source, Path) or source.endswith(SUFFIXES):
        path = Path(source)
        if not path.is_file():
            raise UserError(f"no flow file {path}")
        text, origin, folder = read_text(path), str(path), path.parent
    tree = _mapping(parse_yaml(text, origin, _Loader), FLOW_KEYS, origin)
    if not isinstance(tree.get("flow"), str):
        raise UserError(f"{origin}: the flow has no name, as in `flow: grpo`")
    if not isinstance(tree.get("stages"), list):
        raise UserError(f"{origin}: the flow has no list of stages, as in `stages: [{{role: actor, type: generate}}]`")
    stages = []
    for number, stage in enumerate(tree["stages"], 1):
        name = isinstance(stage, Mapping) and (stage.get("id") or stage.get("type"))
        stages.append(_read_stage(stage, f"{origin}: stage {number}" + (f" ({name})" if name else ""), folder))
    with located(origin):
        return Flow(tree["flow"], stages)


def to_yaml(flow: Flow) -> str:
    """Return a flow as YAML, without default values; `from_yaml` loads it to an equal flow."""
    stages = []
    for stage in flow.stages:
        when = {key: getattr(stage.when, field) for key, field in WHEN_KEYS.items()} if stage.when != ALWAYS else {}
        every = {
            "id": None if stage.name == default_name(stage.type, stage.role, stage.params) else stage.name,
            "role": stage.role,
            "type": stage.type,
            "params": dict(stage.params),
            "after": list(stage.after),
            "when": {key: value for key, value in when.items() if value is not None},
        }
        stages.append({key: value for key, value in every.items() if value})
    tree = {"flow": flow.name, "stages": stages}
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=120)


def _read_stage(tree: Any, location: str, folder: Path) -> Stage:
    """Return a stage. `location` is its location in the file, for errors, and `folder` is searched for files."""
    tree = _mapping(tree, STAGE_KEYS, location)
    for key, kind in (("id", str), ("role", str), ("type", str), ("params", Mapping)):
        if tree.get(key) is not None and not isinstance(tree[key], kind):
            raise UserError(
                f"{location}: {key} must be a {'mapping' if kind is Mapping else 'text'}, got {tree[key]!r}"
            )
    for key, value in texts_and_numbers(tree):
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{location}: {key} must be a finite number, got {value}")
    if not tree.get("type"):
        raise UserError(f"{location}: the stage has no type, as in `type: generate`")
    params = found_beside(folder, tree.get("params") or {}, "params")
    after_value = tree.get("after")
    when = _mapping({} if tree.get("when") is None else tree["when"], WHEN_KEYS, f"{location}: when")
    for key, value in when.items():
        if type(value) is not int and not (key == "until" and value is None):
            raise UserError(f"{location}: when: {key} must be a whole number, got {value!r}")
    after = [after_value] if isinstance(after_value, str) else after_value or []
    if not isinstance(after, list) or not all(isinstance(name, str) for name in after):
        raise UserError(
            f"{location}: after must be a list of stages, as in `after: [reward.verify]`, got {after_value!r}"
        )
    with located(location):
        times = When(**{WHEN_KEYS[key]: value for key, value in when.items()})
        name = relative_to(folder, tree["type"])
        return make_stage(name, tree.get("role"), params, id=tree.get("id"), when=times, after=after)


def _mapping(tree: Any, keys: Collection[str], location: str) -> dict[str, Any]:
    if not isinstance(tree, dict):
        raise UserError(f"{location}: expected keys and values ({', '.join(keys)}), got {tree!r}")
    for key in tree:
        if key not in keys:
            raise UserError(f"{location}: unknown key {key!r}. {suggest(str(key), keys)}")
    return tree
