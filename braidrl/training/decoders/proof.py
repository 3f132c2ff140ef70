"""The proof: Braid and transformers (row by row) must compute equal results on a tiny twin of a decoder, in training
and decoding.

config ─shrink─▶ twin ─packed, mixers or all by rows─▶ log-probs, gradients ─┬─ equal? ─▶ `ForwardPlan` or refusal
                   └─ transformers' attention, each row separately ──────────┘

Plans are found by experiment. The twin first runs fully packed. If a module's output differs from that of single rows
although its inputs agree, the module mixes tokens outside attention: its class then runs over rows of equal length, and
the comparison is repeated. If no set of mixers works, the whole decoder runs over rows of equal length with
transformers' own attention. If results still differ, the model is refused, with the name of the module. Results are
cached on the machine, by configuration, transformers version and code.
"""

import contextlib
import copy
import hashlib
import importlib.util
import io
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.utils import logging as transformers_logging

from braidrl.errors import UserError, first_line
from braidrl.native.building import cache_folder
from braidrl.observe.metrics import whole_file
from braidrl.parsing import parse_json
from braidrl.training.compute.attention import PackedSequences, parameters_of
from braidrl.training.compute.rope_lengths import RopeLengths
from braidrl.training.compute.slots import SlotCache, SlotStep
from braidrl.training.decoders.body import (
    PACKED,
    ForwardPlan,
    body_of,
    decoder_of,
    prefill,
    run_body,
    set_training,
    use_plan,
)
from braidrl.training.decoders.cohorts import Cohorts
from braidrl.training.decoders.head import logits_of, predicted_log_probs
from braidrl.training.decoders.shrink import HEAD_WIDTH, shrink_config, special_ids, tiny_model
from braidrl.training.model_settings import disable_dropout
from braidrl.weights.model_files import has_language_model

LENGTHS = (5, 17, 8, 1, 9, 17, 16, 2)
"""Lengths around the limits of windows and of mixers' chunks; some are equal."""
BOUND = 2e-4
"""Greatest difference of log-probs in float32, in nats; leaks and missing scalings cause a thousand times more."""
ROUNDINGS, MOST_ROUNDING = 8.0, 2e-2
"""Differences between float32 and float64 that a result may have, and the most nats that count as rounding."""
GRADIENT_BOUND = 2e-3
"""Greatest norm of all gradients' difference, relative to the norm of the gradients."""
FOUND = 3
"""Most mixer classes of a plan."""
SLOTS = 16
"""Slots of the engine in the proof of decoding."""
PROMPTS = (2, 9, 8, 1, 1, 9, 2, 1)
"""Prompt tokens of each of the twin's rows; of two with equal prompts the first ends first."""
FAILURES = (Exception,)
"""Errors of transformers' models under unexpected calls: any type; the model is then refused in one line."""
OF_OUTPUT = re.compile("output_|return_|use_cache|is_|add_cross|tie_|_|chunk_size_feed|torchscript")
"""Beginnings of switches that change no logits, or the class of a model."""
UNNAMED = (
    "_name_or_path",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "_attn_implementation",
    "num_labels",
    "id2label",
    "label2id",
)
"""Settings that do not affect a model's structure."""
CODE = ("training", "engines", "native", "algorithms")
"""The rooms of Braid on whose code a proof depends."""
MEASUREMENT_BYTES = 1 << 16
MEASURED: tuple[dict[str, Any], ...] = (
    {"refused": str},
    {"refused": str, "mutual": bool},
    {"mixers": list, "by_rows": bool, "decoding": str},
    {"name": str, "value": (int, float), "bound": (int, float), "note": str},
)
"""Names and types in a file of the cache."""
KNOWN: dict[str, dict[str, Any]] = {}
"""What `remembered` has read or measured in this process."""


class Refusal(Exception):
    """The reason, in one line, why a model is not supported."""


@dataclass(frozen=True)
class Finding:
    """One measured property of a model, and its bound."""

    name: str
    value: float
    bound: float
    note: str = ""

    @staticmethod
    def of(name: str, measure: Callable[..., tuple[float, float]], *arguments: Any) -> "Finding":
        """Call `measure`, which returns a value and its bound; an error counts as a failed property."""
        try:
            return Finding(name, *measure(*arguments))
        except FAILURES as error:
            return Finding(name, float("inf"), BOUND, first_line(error))

    @property
    def holds(self) -> bool:
        return self.value <= self.bound


class Twin:
    """A tiny model with the structure of a configuration, random rows, and transformers' results on them."""

    def __init__(
        self,
        config: Any,
        seed: int = 0,
        alter: Callable[[Any], None] | None = None,
        head_width: int = HEAD_WIDTH,
        device: str = "cpu",
    ) -> None:
        """Shrink a configuration; tests inject faults into Braid's models by `alter`."""
        self.config, self.device = shrink_config(config, head_width), torch.device(device)
        self._plain = copy.deepcopy(self.config)
        disable_dropout(self.config)
        self.seed, self._alter = seed, alter
        text = self.config.get_text_config()
        generator = torch.Generator().manual_seed(seed)
        rows = [torch.randint(2, text.vocab_size - 4, (length,), generator=generator) for length in LENGTHS]
        # Special tokens are placed as in texts: at the ends, and between turns.
        for number, (row, special) in enumerate(zip(rows, cycle(special_ids(self.config) or [2]), strict=False)):
            row[-1], row[len(row) // 2 if number % 2 else 0] = special, special
        weights = [torch.randn(length - 1, generator=generator) for length in LENGTHS]
        self.rows, self.weights = ([tensor.to(self.device) for tensor in drawn] for drawn in (rows, weights))

    def model(self, plan: ForwardPlan) -> Any:
        """Create the twin for a plan, always with the same weights."""
        model: Any = tiny_model(self.config, self.seed, attn_implementation=plan.attention)
        model.to(self.device)
        use_plan(model, plan)
        if self._alter is not None:
            self._alter(model)
        return model

    @cached_property
    def reference(self) -> Any:
        """Return the twin as transformers runs it, with transformers' attention and unchanged settings."""
        model: Any = tiny_model(self._plain, self.seed, attn_implementation="eager")
        return model.to(self.device)

    @cached_property
    @torch.enable_grad()  # also under a caller's no_grad
    def alone(self) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return transformers' log-probs of each single row, and the gradients of their weighted sum."""
        log_probs, gradients = [], dict[str, Tensor]()
        for row, weights in zip(self.rows, self.weights, strict=True):
            model = self.untouched()
            logits = model(input_ids=row[None], use_cache=False).logits[0, :-1]
            of_tokens = logits.float().log_softmax(-1).gather(-1, row[1:, None])[:, 0]
            (of_tokens * weights).sum().backward()
            log_probs.append(of_tokens.detach())
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    gradients[name] = gradients.get(name, 0) + parameter.grad
            model.zero_grad()
        return log_probs, gradients

    @cached_property
    @torch.no_grad()
    def bound(self) -> float:
        """Return the greatest difference of log-probs (nats) explained by rounding: BOUND, or several times the
        difference between transformers in float32 and float64.
        """
        try:
            exact = copy.deepcopy(self.untouched()).double()
            exact.set_experts_implementation("eager")  # grouped products have no float64
            logits = [exact(input_ids=row[None], use_cache=False).logits[0, :-1] for row in self.rows]
        except FAILURES:  # kernels without float64
            return BOUND
        in_float64 = [
            scores.log_softmax(-1).gather(-1, row[1:, None])[:, 0]
            for scores, row in zip(logits, self.rows, strict=True)
        ]
        rounding = distance([log_probs.double() for log_probs in self.alone[0]], in_float64)
        return max(BOUND, min(ROUNDINGS * rounding, MOST_ROUNDING))

    def untouched(self) -> Any:
        """Return transformers' twin before its first row; some ropes keep state of earlier rows."""
        return copy.deepcopy(self.reference) if RopeLengths.of(self.config) else self.reference

    @cached_property
    @torch.no_grad()
    def decoded(self) -> list[Tensor]:
        """Return transformers' log-probs of each row's tokens after its prompt, each after only the tokens before it.

        If factors of the rope depend on a row's length, they are those for its length at that time.
        """
        if not RopeLengths.of(self.config):
            return [row[prompt - 1 :] for row, prompt in zip(self.alone[0], PROMPTS, strict=True)]
        log_probs = []
        for row, prompt in zip(self.rows, PROMPTS, strict=True):
            ends = range(prompt, len(row))
            logits = [self.untouched()(input_ids=row[None, :end], use_cache=False).logits[0, -1] for end in ends]
            values = [scores.float().log_softmax(-1)[row[end]] for scores, end in zip(logits, ends, strict=True)]
            log_probs.append(torch.stack(values) if values else torch.zeros(0, device=self.device))
        return log_probs


def packed_log_probs(model: Any, rows: Sequence[Tensor]) -> list[Tensor]:
    """Return the log-probs of packed rows, as in training."""
    sequences = PackedSequences.of([len(row) for row in rows], rows[0].device, keep_scores=True)
    hidden = run_body(model, torch.cat(list(rows))[None], sequences.position_ids(), sequences)[0]
    ends = torch.tensor([len(row) for row in rows]).cumsum(0) - 1
    kept = torch.ones(len(hidden), dtype=torch.bool, device=hidden.device)
    kept[ends] = False
    log_probs, _ = predicted_log_probs(model, hidden[kept], torch.cat([row[1:] for row in rows]))
    return list(log_probs.split([len(row) - 1 for row in rows]))


def packed_findings(twin: Twin, model: Any) -> list[Finding]:
    """Compare packed rows with single rows: log-probs, gradients, row order and causality, in training mode."""
    alone, gradients = twin.alone
    model.zero_grad()
    set_training(model, True)
    packed = packed_log_probs(model, twin.rows)
    sum((p * w).sum() for p, w in zip(packed, twin.weights, strict=True)).backward()  # type: ignore[union-attr]
    packed = [log_probs.detach() for log_probs in packed]
    packed_gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    total = torch.cat([g.flatten() for g in gradients.values()]).norm()
    differing = sum(
        (packed_gradients[n] - g if n in packed_gradients else g).square().sum() for n, g in gradients.items()
    )
    with torch.no_grad():
        turned = packed_log_probs(model, twin.rows[::-1])[::-1]
        short = packed_log_probs(model, [torch.cat([twin.rows[1][:9], twin.rows[5][9:]]), twin.rows[0]])
    gradient = float(torch.as_tensor(differing).sqrt() / total)
    return [
        Finding("packed rows equal rows alone: log-probs", distance(packed, alone), twin.bound),
        Finding("packed rows equal rows alone: gradients", gradient, GRADIENT_BOUND),
        Finding("order of rows changes nothing", distance(turned, alone), twin.bound),
        Finding("a token sees only tokens before it", distance([short[0][:8]], [packed[1][:8]]), twin.bound),
    ]


def distance(ours: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the greatest absolute difference of two lists of tensors; infinity for NaN."""
    greatest = max(
        float((a - b).detach().abs().max()) if a.numel() else 0.0 for a, b in zip(ours, expected, strict=True)
    )
    return greatest if greatest == greatest else float("inf")


@torch.no_grad()
def unexercised(config: Any) -> list[str]:
    """Return the switches of a configuration that differ from the type's default and change nothing in its twin.

    The proof does not cover them.
    """
    text, unseen = config.get_text_config(), list[str]()
    usual, row = type(text)().to_dict(), torch.arange(2, 2 + max(LENGTHS))[None]

    def logits(switched: str | None = None) -> Tensor:
        changed = copy.deepcopy(text)
        if switched is not None:
            setattr(changed, switched, usual[switched])
        model: Any = tiny_model(shrink_config(changed), attn_implementation="eager")
        return torch.as_tensor(model(input_ids=row, use_cache=False).logits)

    names = [name for name, value in text.to_dict().items() if isinstance(value, bool) and value != usual.get(name)]
    for name in (name for name in names if name in usual and not OF_OUTPUT.match(name)):
        try:
            if torch.equal(logits(), logits(name)):
                unseen.append(name)
        except FAILURES:  # the other value needs other settings
            continue
    return unseen


def find_plan(twin: Twin) -> tuple[ForwardPlan, list[Finding]]:
    """Return the first plan whose findings hold, with the findings. Raises Refusal if there is none."""
    if getattr(twin.config, "is_encoder_decoder", False):
        raise Refusal("an encoder and a decoder")
    if not has_language_model(twin.config):
        raise Refusal(
            "transformers has no class of this type that predicts the next token; give the folder of a model that "
            "generates text"
        )
    if "shared_kv_states" in parameters_of(type(twin.reference).forward):
        raise Refusal("a drafter: it computes with the keys and values of another model")
    row = twin.rows[1]
    # The same length, so that only the tokens after the ninth differ.
    changed = torch.cat([row[:9], twin.rows[5][9:]])
    with torch.no_grad():
        full, part = (twin.untouched()(input_ids=ids[None], use_cache=False).logits[0, :9] for ids in (row, changed))
    if float((full.log_softmax(-1) - part.log_softmax(-1)).abs().max()) > twin.bound:
        raise Refusal("a token's logits depend on the tokens after it, as in an encoder")
    try:
        body_of(twin.reference)
    except UserError as error:
        raise Refusal(str(error).removeprefix("model: ")) from error
    # The innermost leaking module is the first candidate for one more mixer, then its parents; rows alone are the last
    # resort.
    reasons, plans = list[str](), [ForwardPlan(by_rows=True), PACKED]
    while plans:
        plan = plans.pop()
        try:
            model = twin.model(plan)
            findings = packed_findings(twin, model)
        except FAILURES as error:
            reasons.append(first_line(error))
            continue
        wrong = next((finding for finding in findings if not finding.holds), None)
        if wrong is None:
            return plan, findings
        differs = f"{wrong.name}: differs by {wrong.value:.1g}"
        if plan.by_rows:
            reasons[0] += f"; by rows: {differs}"
            continue
        leaking = leaking_modules(twin, model)
        reasons.append(f"{leaking[0] if leaking else type(decoder_of(model)).__name__} mixes tokens: {differs}")
        if len(plan.mixers) < FOUND:
            more = [name for name in leaking if name not in plan.mixers]
            plans += [ForwardPlan((*plan.mixers, name)) for name in reversed(more)]
    raise Refusal(reasons[0])


def best_plan(twin: Twin) -> tuple[ForwardPlan, list[Finding]]:
    """Return the first plan that trains correctly, preferring one that also decodes, with its findings; the last is of
    decoding.
    """
    plan, findings = find_plan(twin)
    decoding = decoding_finding(twin, plan)
    rows = ForwardPlan(by_rows=True)
    if not decoding.holds and not plan.by_rows and (by_decoding := decoding_finding(twin, rows)).holds:
        findings_without_mixers = packed_findings(twin, twin.model(rows))
        if all(finding.holds for finding in findings_without_mixers):
            return rows, [*findings_without_mixers, by_decoding]
    return plan, [*findings, decoding]


@torch.no_grad()
def leaking_modules(twin: Twin, model: Any) -> list[str]:
    """Return the class of the first module that mixes packed rows (its output differs, its inputs agree), then those of
    its parents.
    """
    set_training(model, False)
    packed, alone = _calls(model, [twin.rows]), _calls(model, [[row] for row in twin.rows])
    for (name, inputs, theirs), (packed_name, packed_inputs, ours) in zip(alone, packed, strict=False):
        if name != packed_name or theirs.shape != ours.shape or inputs.shape != packed_inputs.shape:
            continue
        if type(model.get_submodule(name)).__module__.startswith("torch."):
            continue
        output_differs, inputs_differ = (
            a.numel() > 0 and float((b - a).abs().max()) > 1e-3 * float(a.abs().max() + 1e-6)
            for a, b in ((theirs, ours), (inputs, packed_inputs))
        )
        if output_differs and not inputs_differ:
            around = [name.rsplit(".", up)[0] for up in range(name.count(".") + 1)]
            modules = [model.get_submodule(n) for n in around if re.search(r"\.\d+\.", n)]
            return list(dict.fromkeys(type(m).__name__ for m in modules if not isinstance(m, nn.ModuleList)))
    return []


def _calls(model: Any, batches: Sequence[Sequence[Tensor]]) -> list[tuple[str, Tensor, Tensor]]:
    """Run batches of packed rows; return (name, inputs, output) of each module call, joined over batches, in the order
    of their ends.
    """
    names = {module: name for name, module in model.named_modules()}
    calls: list[list[tuple[str, Tensor, Tensor]]] = []

    def keep(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        values = (first, *arguments, *named.values())
        hold = [isinstance(v, Tensor) and v.dim() >= 3 and v.shape[:2] == (1, tokens) for v in values]
        if hold[0]:
            states = [v[0].reshape(tokens, -1).float() for v, holds in zip(values[1:], hold[1:], strict=True) if holds]
            inputs = torch.cat(states, -1) if states else torch.empty(tokens, 0)
            calls[-1].append((names[module], inputs, first[0].detach().clone()))

    hooks = [module.register_forward_hook(keep, with_kwargs=True) for module in decoder_of(model).modules()]
    try:
        for rows in batches:
            sequences = PackedSequences.of([len(row) for row in rows], rows[0].device)
            tokens = sum(sequences.lengths)
            calls.append([])
            run_body(model, torch.cat(list(rows))[None], sequences.position_ids(), sequences)
    finally:
        for hook in hooks:
            hook.remove()
    joined = []
    for parts in zip(*calls, strict=False):
        if len({(name, inputs.shape[1:], output.shape[1:]) for name, inputs, output in parts}) == 1:
            _, inputs, outputs = zip(*parts, strict=True)
            joined.append((parts[0][0], torch.cat(inputs), torch.cat(outputs)))
    return joined


def decoding_finding(twin: Twin, plan: ForwardPlan) -> Finding:
    """Decode the twin's rows token by token, and compare with single rows under transformers."""
    return Finding.of("embedded engine equals trainer: prefill and decode", decoding_distance, twin, plan)


@torch.no_grad()
def decoding_distance(twin: Twin, plan: ForwardPlan) -> tuple[float, float]:
    """Return the greatest difference of log-probs decoded token by token, from slots between which rows move, or by
    rows; and its bound.
    """
    model, rows = twin.model(plan), twin.rows
    cohorts, cache = Cohorts(model), SlotCache(SLOTS, torch.float32, twin.device)
    if plan.by_rows:
        first = 0
        cohorts.begin({number: row[:prompt] for number, (row, prompt) in enumerate(zip(rows, PROMPTS, strict=True))})
    else:
        first = 4  # row n moves from slot n + 1 to slot n + 4
        cache.reserve(max(len(row) for row in rows))
        long = [n for n, prompt in enumerate(PROMPTS) if prompt > 1]
        prefixes = dict(zip(long, prefill(model, [rows[n][: PROMPTS[n] - 1] for n in long]), strict=True))
        for number in range(len(rows)):
            cache.fill(torch.tensor([number + 1], device=twin.device), prefixes.get(number))
        for number in reversed(range(len(rows))):
            cache.move(number + 1, number + first, PROMPTS[number])
    log_probs: list[list[Tensor]] = [[] for _ in rows]
    lengths = RopeLengths.of(twin.config)
    for step in range(max(len(row) - prompt for row, prompt in zip(rows, PROMPTS, strict=True))):
        current, position = (torch.zeros(SLOTS, dtype=torch.int64, device=twin.device) for _ in range(2))
        positions = [min(prompt - 1 + step, len(row) - 1) for row, prompt in zip(rows, PROMPTS, strict=True)]
        for number, (row, slot) in enumerate(zip(rows, positions, strict=True)):
            current[number + first], position[number + first] = row[slot], slot
            if step and not plan.by_rows and lengths.kind(slot + 1) != lengths.kind(slot):
                (prefix,) = prefill(model, [row[:slot]])
                cache.fill(torch.tensor([number + first], device=twin.device), prefix)
        if plan.by_rows:
            cohorts.end(n for n, row in enumerate(rows) if positions[n] >= len(row) - 1)
            hidden = cohorts.hidden(current, position)
        else:
            context = SlotStep(cache, position, int(position.max()) + 1)
            hidden = run_body(model, current[:, None], position[:, None], context)[:, 0]
        logits = logits_of(model, hidden).float().log_softmax(-1)
        for number, (row, slot) in enumerate(zip(rows, positions, strict=True)):
            if slot + 1 < len(row):
                log_probs[number].append(logits[number + first, row[slot + 1]])
    ours = [torch.stack(values) if values else torch.zeros(0, device=twin.device) for values in log_probs]
    return distance(ours, twin.decoded), twin.bound


def proven_plan(config: Any, folder: Path | str, decodes: bool = False) -> ForwardPlan:
    """Return the proven forward plan of a configuration, measured once on this machine; messages name its `folder`.

    Raises UserError if no plan is proven correct, and with `decodes` if the embedded engine does not compute the
    trainer's log-probs.
    """

    def measured() -> dict[str, Any]:
        try:
            with quietly(), torch.enable_grad():  # a checkpoint may be loaded under no_grad
                plan, (*_, decoding) = best_plan(Twin(config, device=proof_device()))
        except Refusal as refusal:
            return {"refused": str(refusal)}
        except FAILURES as error:
            return {"refused": f"a tiny model of its structure cannot be loaded: {first_line(error)}"}
        why = "" if decoding.holds else decoding.note or f"log-probs differ by {decoding.value:.1g}"
        return {"mixers": plan.mixers, "by_rows": plan.by_rows, "decoding": why}

    measurement = remembered(config, "decoder", measured)
    if "refused" in measurement:
        raise UserError(
            f"model: {folder}, {config.model_type}, is not proven to train correctly: {measurement['refused']}; "
            "docs/models.md lists the types that are"
        )
    if decodes and (why := measurement["decoding"]):
        raise UserError(f"model: {folder}, {config.model_type}, is not proven to decode in the embedded engine: {why}")
    return ForwardPlan(tuple(measurement["mixers"]), measurement["by_rows"])


def remembered(config: Any, about: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return this machine's cached measurement of a configuration, or measure and cache it."""
    settings = {name: value for name, value in config.to_dict().items() if name not in UNNAMED}
    # A proof also depends on torch, on transformers, and on all code that trains and decodes.
    versions = transformers.__version__ + torch.__version__ + model_digest(type(config).__module__) + code_digest()
    text = json.dumps(settings, sort_keys=True, default=str) + versions + proof_device()
    key = f"{about}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"
    if key not in KNOWN:
        path = cache_folder() / f"{key}.json"
        measurement = read_measurement(path)
        if measurement is None:
            measurement = measure()
            # Several processes may prove a model concurrently.
            with whole_file(path) as unfinished:
                unfinished.write_text(json.dumps(measurement))
        KNOWN[key] = measurement
    return KNOWN[key]


def read_measurement(path: Path) -> dict[str, Any] | None:
    """Read a cached measurement; return None if the file holds none."""
    try:
        content = parse_json(path.read_bytes(), MEASUREMENT_BYTES, finite=False)
    except (OSError, ValueError):
        return None
    for fields in MEASURED:
        if isinstance(content, dict) and content.keys() == fields.keys():
            fitting = all(
                isinstance(content[name], kind) and content[name] == content[name] for name, kind in fields.items()
            )
            return content if fitting and all(isinstance(part, str) for part in content.get("mixers", ())) else None
    return None


@cache
def code_digest() -> str:
    """Return a digest of the code that trains and decodes, with its kernels."""
    package = Path(__file__).parents[2]
    files = (file for room in CODE for file in (package / room).rglob("*") if file.suffix in (".py", ".c", ".h"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()


@cache
def model_digest(name: str) -> str:
    """Return a digest of transformers' files of a model, the module of its configuration, and the shared files."""
    file = getattr(sys.modules[name], "__file__", None)
    sources = sorted(Path(file).parent.glob("*.py")) if file else []
    shared = sorted(path for path in Path(transformers.__file__).parent.glob("*.py"))
    states = "".join(f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns};" for path in shared)
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources) + states.encode()).hexdigest()


def proof_device() -> str:
    """Return CUDA if transformers would use kernels that compute only there, otherwise the CPU."""
    return "cuda" if torch.cuda.is_available() and importlib.util.find_spec("fla") else "cpu"


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Silence transformers' output and its warnings about kernels that a tiny twin does not need."""
    transformers_logging.disable_progress_bar()
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(disabled)
