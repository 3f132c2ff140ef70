"""The proof: Braid and transformers (row by row) must compute equal results on a tiny twin of a decoder, in training and decoding.

config ──shrink──▶ twin ──packed, mixers by rows, or all by rows──▶ log-probs, gradients ─┬─ equal? ──▶ a `ForwardPlan`, or a refusal
                     └──── transformers' own attention, each row alone ──────────────────┘

Plans are found by experiment. The twin first runs fully packed. If a module's output differs from that of single rows although its
inputs agree, the module mixes tokens outside attention: its class then runs over rows of equal length, and the comparison is repeated.
If no set of mixers works, the whole decoder runs over rows of equal length with transformers' own attention. If results still differ,
the model is refused, with the name of the module.

Shapes: B rows, N tokens in total.
"""

import contextlib
import copy
import io
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging as transformers_logging

from braidrl.errors import first_line
from braidrl.training.compute.attention import PackedSequences, parameters_of
from braidrl.training.compute.slots import PrefillSequences, SlotCache, SlotStep
from braidrl.training.decoders.body import (
    PACKED,
    ForwardPlan,
    decoder_of,
    run_body,
    set_training,
    still,
    use_plan,
)
from braidrl.training.decoders.cohorts import Cohorts
from braidrl.training.decoders.head import logits_of, predicted_log_probs
from braidrl.training.decoders.shrink import HEAD_WIDTH, shrink_config, tiny_model

LENGTHS = (5, 17, 8, 1, 9, 17, 16, 2)
"""Lengths around the limits of windows and of mixers' chunks; some are equal."""
BOUND = 2e-4
"""Greatest difference of log-probs in float32, in nats; leaks and missing scalings cause a thousand times more."""
GRADIENT_BOUND = 2e-3
"""Greatest norm of all gradients' difference, relative to the norm of the gradients."""
FOUND = 3
"""Most mixer classes of a plan."""


SLOTS = 16
"""Slots of the engine in the proof of decoding."""
PROMPTS = (2, 9, 8, 1, 1, 9, 5, 1)
"""Prompt tokens of each of the twin's rows."""


class Refusal(Exception):
    """The reason, in one line, why a model is not supported."""


@dataclass(frozen=True)
class Finding:
    """One measured property of a model, and the bound up to which it holds."""

    name: str
    value: float
    bound: float
    note: str = ""

    @property
    def holds(self) -> bool:
        return self.value <= self.bound


class Twin:
    """A tiny model with the structure of a configuration, random rows, and transformers' results on them."""

    def __init__(
        self, config: Any, seed: int = 0, alter: Callable[[Any], None] | None = None, head_width: int = HEAD_WIDTH,
        device: str = "cpu",
    ) -> None:  # fmt: skip
        """Shrink a configuration; tests inject faults into Braid's models by `alter`."""
        self.config, self.device = shrink_config(config, head_width), torch.device(device)
        self._plain = copy.deepcopy(self.config)
        still(self.config)
        self.seed, self._alter = seed, alter
        text = self.config.get_text_config()
        generator = torch.Generator().manual_seed(seed)
        rows = [torch.randint(2, text.vocab_size - 4, (length,), generator=generator) for length in LENGTHS]
        weights = [torch.randn(length - 1, generator=generator) for length in LENGTHS]
        self.rows, self.weights = ([each.to(self.device) for each in drawn] for drawn in (rows, weights))

    def model(self, plan: ForwardPlan) -> Any:
        """Create the twin for a plan, always with the same weights."""
        model: Any = tiny_model(self.config, self.seed, attn_implementation=plan.attention)
        model.to(self.device)
        use_plan(model, plan)
        if self._alter is not None:
            self._alter(model)
        return model

    @cached_property
    def own(self) -> Any:
        """Return the twin as transformers runs it, with its own attention and all settings as they are."""
        model: Any = tiny_model(self._plain, self.seed, attn_implementation="eager")
        return model.to(self.device)

    @cached_property
    @torch.enable_grad()  # also under a caller's no_grad
    def alone(self) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return transformers' log-probs of each single row, and the gradients of their weighted sum."""
        log_probs = []
        for row, weights in zip(self.rows, self.weights, strict=True):
            logits = self.own(input_ids=row[None], use_cache=False).logits[0, :-1]
            found = logits.float().log_softmax(-1).gather(-1, row[1:, None])[:, 0]
            (found * weights).sum().backward()
            log_probs.append(found.detach())
        return log_probs, {n: p.grad for n, p in self.own.named_parameters() if p.grad is not None}


def packed_log_probs(model: Any, rows: Sequence[Tensor]) -> list[Tensor]:
    """Return the log-probs of packed rows, as in training."""
    sequences = PackedSequences.of([len(row) for row in rows], rows[0].device, keep_scores=True)
    hidden = run_body(model, torch.cat(list(rows))[None], sequences.position_ids(), sequences)[0]
    ends = torch.tensor([len(row) for row in rows]).cumsum(0) - 1
    kept = torch.ones(len(hidden), dtype=torch.bool, device=hidden.device)
    kept[ends] = False
    found, _ = predicted_log_probs(model, hidden[kept], torch.cat([row[1:] for row in rows]))
    return list(found.split([len(row) - 1 for row in rows]))


def packed_findings(twin: Twin, model: Any) -> list[Finding]:
    """Compare packed rows with single rows: log-probs, gradients, row order and causality, in training mode."""
    alone, gradients = twin.alone
    model.zero_grad()
    set_training(model, True)
    packed = packed_log_probs(model, twin.rows)
    sum((p * w).sum() for p, w in zip(packed, twin.weights, strict=True)).backward()  # type: ignore[union-attr]
    packed = [each.detach() for each in packed]
    own = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    total = torch.cat([g.flatten() for g in gradients.values()]).norm()
    differing = sum((own[n] - g if n in own else g).square().sum() for n, g in gradients.items())
    with torch.no_grad():
        order = list(range(len(twin.rows)))[::-1]
        turned = packed_log_probs(model, [twin.rows[n] for n in order])
        short = packed_log_probs(model, [twin.rows[1][:9], twin.rows[0]])
    return [
        Finding("packed rows equal rows alone: log-probs", distance(packed, alone), BOUND),
        Finding(
            "packed rows equal rows alone: gradients", float(torch.as_tensor(differing).sqrt() / total), GRADIENT_BOUND
        ),
        Finding(
            "order of rows changes nothing", distance([turned[order.index(n)] for n in range(len(order))], alone), BOUND
        ),
        Finding("a token sees only tokens before it", distance([short[0]], [packed[1][:8]]), BOUND),
    ]


def distance(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Return the greatest absolute difference of two lists of tensors; infinity for NaN."""
    found = max(float((a - b).abs().max()) if a.numel() else 0.0 for a, b in zip(ours, theirs, strict=True))
    return found if found == found else float("inf")


def find_plan(twin: Twin) -> tuple[ForwardPlan, list[Finding]]:
    """Return the first plan whose findings hold, with the findings. Raises Refusal if there is none."""
    if "shared_kv_states" in parameters_of(type(twin.own).forward):
        raise Refusal("a drafter: it computes with the keys and values of another model")
    row = twin.rows[1]
    with torch.no_grad():
        whole, part = (twin.own(input_ids=ids[None], use_cache=False).logits[0, :9] for ids in (row, row[:9]))
    if float((whole.log_softmax(-1) - part.log_softmax(-1)).abs().max()) > BOUND:
        raise Refusal("a token's logits depend on the tokens after it, as in an encoder")
    # The innermost leaking module is the first candidate for one more mixer, then its parents.
    reasons, plans = list[str](), [PACKED]
    while plans:
        plan = plans.pop()
        try:
            model = twin.model(plan)
            findings = packed_findings(twin, model)
        except FAILURES as error:
            reasons.append(first_line(error))
            continue
        wrong = [finding for finding in findings if not finding.holds]
        if not wrong:
            return plan, findings
        leaking = leaking_modules(twin, model)
        name = leaking[0] if leaking else type(decoder_of(model)).__name__
        reasons.append(f"{name} mixes tokens: {wrong[0].name}: differs by {wrong[0].value:.1g}")
        if len(plan.mixers) < FOUND:
            more = [name for name in leaking if name not in plan.mixers]
            plans += [ForwardPlan((*plan.mixers, name)) for name in reversed(more)]
    rows = ForwardPlan(by_rows=True)
    try:
        findings = packed_findings(twin, twin.model(rows))
    except FAILURES as error:
        raise Refusal(reasons[0] if reasons else first_line(error)) from error
    if wrong := [finding for finding in findings if not finding.holds]:
        raise Refusal(f"{reasons[0]}; by rows: {wrong[0].name}: differs by {wrong[0].value:.1g}")
    return rows, findings


FAILURES = (Exception,)
"""Errors of transformers' models under unexpected calls: any type; the model is then refused in one line."""


@torch.no_grad()
def leaking_modules(twin: Twin, model: Any) -> list[str]:
    """Return the class of the first module whose output differs between packed and single rows although its inputs agree.

    The classes of its parent modules follow, up to the decoder's layer.
    """
    set_training(model, False)
    packed, alone = (_calls(model, twin.rows, packed=together) for together in (True, False))
    for (name, given, theirs), (other, also, ours) in zip(alone, packed, strict=False):
        if name != other or theirs.shape != ours.shape or given.shape != also.shape:
            continue
        if type(model.get_submodule(name)).__module__.startswith("torch."):
            continue
        output_differs, inputs_differ = (
            a.numel() > 0 and float((b - a).abs().max()) > 1e-3 * float(a.abs().max() + 1e-6)
            for a, b in ((theirs, ours), (given, also))
        )
        if output_differs and not inputs_differ:
            around = [name.rsplit(".", up)[0] for up in range(name.count(".") + 1)]
            inner = [
                n for n in around if re.search(r"\.\d+\.", n) and not isinstance(model.get_submodule(n), nn.ModuleList)
            ]
            return list(dict.fromkeys(type(model.get_submodule(n)).__name__ for n in inner))
    return []


def _calls(model: Any, rows: Sequence[Tensor], packed: bool) -> list[tuple[str, Tensor, Tensor]]:
    """Return (name, inputs, output) of each module call over all tokens, in the order in which calls return."""
    decoder = decoder_of(model)
    found: list[list[tuple[str, Tensor, Tensor]]] = []
    names = {module: name for name, module in model.named_modules()}
    inputs: dict[nn.Module, list[Tensor]] = {}

    def of_tokens(value: Any) -> bool:
        return isinstance(value, Tensor) and value.dim() >= 3 and value.shape[:2] == (1, tokens)

    def begin(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        states = [v[0].reshape(tokens, -1).float() for v in (*given, *named.values()) if of_tokens(v)]
        inputs.setdefault(module, []).append(torch.cat(states, -1) if states else torch.empty(tokens, 0))

    def end(module: nn.Module, _: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        given = inputs[module].pop()
        if of_tokens(first):
            found[-1].append((names[module], given, first[0].detach().clone()))

    hooks: list[Any] = []
    for module in decoder.modules():
        hooks += [module.register_forward_pre_hook(begin, with_kwargs=True), module.register_forward_hook(end)]
    try:
        for part in [list(rows)] if packed else [[row] for row in rows]:
            sequences = PackedSequences.of([len(row) for row in part], part[0].device)
            tokens = sum(sequences.lengths)
            found.append([])
            run_body(model, torch.cat(part)[None], sequences.position_ids(), sequences)
    finally:
        for hook in hooks:
            hook.remove()
    calls = [
        parts for parts in zip(*found, strict=False) if len({(n, i.shape[1:], o.shape[1:]) for n, i, o in parts}) == 1
    ]
    return [(parts[0][0], *(torch.cat(each) for each in list(zip(*parts, strict=True))[1:])) for parts in calls]


@torch.no_grad()
def decoding_finding(twin: Twin, plan: ForwardPlan) -> Finding:
    """Decode the twin's rows token by token, and compare with single rows under transformers."""
    name = "embedded engine equals trainer: prefill and decode"
    try:
        found = decoded(twin, plan)
    except FAILURES as error:
        return Finding(name, float("inf"), BOUND, first_line(error))
    return Finding(
        name, distance(found, [row[prompt - 1 :] for row, prompt in zip(twin.alone[0], PROMPTS, strict=True)]), BOUND
    )


def decoded(twin: Twin, plan: ForwardPlan) -> list[Tensor]:
    """Return the log-probs of each row's response, decoded one token per step.

    Rows decode from slots, between which they also move, or by rows with the model's own cache.
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
        sequences = PackedSequences.of([PROMPTS[n] - 1 for n in long], twin.device)
        keeping = PrefillSequences(sequences)
        run_body(model, torch.cat([rows[n][: PROMPTS[n] - 1] for n in long])[None], sequences.position_ids(), keeping)
        prefixes = dict(zip(long, keeping.prefixes(len(long)), strict=True))
        for number in range(len(rows)):
            cache.fill(torch.tensor([number + 1], device=twin.device), prefixes.get(number))
        for number in reversed(range(len(rows))):
            cache.move(number + 1, number + first, PROMPTS[number])
    found: list[list[Tensor]] = [[] for _ in rows]
    for step in range(max(len(row) - prompt for row, prompt in zip(rows, PROMPTS, strict=True))):
        current, position = (torch.zeros(SLOTS, dtype=torch.int64, device=twin.device) for _ in range(2))
        places = [min(prompt - 1 + step, len(row) - 1) for row, prompt in zip(rows, PROMPTS, strict=True)]
        for number, (row, place) in enumerate(zip(rows, places, strict=True)):
            current[number + first], position[number + first] = row[place], place
        if plan.by_rows:
            cohorts.end(n for n, row in enumerate(rows) if places[n] >= len(row) - 1)
            hidden = cohorts.hidden(current, position)
        else:
            context = SlotStep(cache, position, int(position.max()) + 1)
            hidden = run_body(model, current[:, None], position[:, None], context)[:, 0]
        logits = logits_of(model, hidden).float().log_softmax(-1)
        for number, (row, place) in enumerate(zip(rows, places, strict=True)):
            if place + 1 < len(row):
                found[number].append(logits[number + first, row[place + 1]])
    return [torch.stack(values) if values else torch.zeros(0, device=twin.device) for values in found]


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Silence transformers' output and its warnings about kernels that a tiny twin does not need."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(disabled)
        transformers_logging.set_verbosity(level)
