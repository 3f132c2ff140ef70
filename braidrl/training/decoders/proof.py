"""What may be trained: a tiny twin of a decoder is computed by Braid and, row by row, by transformers alone, and must agree.

config ──shrink──▶ twin ──packed, mixers by rows, or all by rows──▶ log-probs, gradients ─┬─ equal? ──▶ a `ForwardPlan`, or a refusal
                     └──── transformers' own attention, each row alone ──────────────────┘

A plan is found, not looked up. The twin is packed first as it is. A module whose output then differs from that of the rows alone, while
its inputs agree, mixes tokens outside of the attention interface: its class runs by rows of equal length, and the comparison is made
again. Where that does not help the whole decoder runs by rows with transformers' own attention. What still differs is refused, and
the refusal names the module.

Shapes: B rows, N tokens of them together.
"""

import contextlib
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
from braidrl.training.compute.attention import PackedSequences
from braidrl.training.decoders.body import (
    PACKED,
    ForwardPlan,
    decoder_of,
    run_body,
    set_training,
    still,
    use_plan,
)
from braidrl.training.decoders.head import predicted_log_probs
from braidrl.training.decoders.shrink import shrink_config, tiny_model

LENGTHS = (5, 17, 8, 1, 9, 17, 16, 2)
"""Rows around the borders of windows and of mixers' chunks, two of them equally long."""
BOUND = 2e-4
"""Greatest difference of a log-prob in float32, in nats: leaks and left-out scalings are a thousand times larger."""
GRADIENT_BOUND = 2e-3
"""Greatest difference of a parameter's gradient, relative to the norm of all gradients."""
FOUND = 3
"""Rounds in which mixers are looked for."""


class Refusal(Exception):
    """Why a model may not be trained, in one line."""


@dataclass(frozen=True)
class Finding:
    """One property of a model: what was measured, and the greatest value at which it holds."""

    name: str
    value: float
    bound: float
    note: str = ""

    @property
    def holds(self) -> bool:
        return self.value <= self.bound


class Twin:
    """A tiny model of the structure that a configuration describes, and what transformers makes of rows of its tokens."""

    def __init__(self, config: Any, seed: int = 0, alter: Callable[[Any], None] | None = None) -> None:
        """Shrink a configuration; `alter` changes each model that is made for Braid, as a test does that puts a fault into it."""
        self.config = shrink_config(config)
        still(self.config)
        self.seed, self._alter = seed, alter
        text = self.config.get_text_config()
        generator = torch.Generator().manual_seed(seed)
        self.rows = [torch.randint(2, text.vocab_size - 4, (length,), generator=generator) for length in LENGTHS]
        self.weights = [torch.randn(length - 1, generator=generator) for length in LENGTHS]

    def model(self, plan: ForwardPlan) -> Any:
        """Make the twin for a plan; all have the same weights."""
        model = tiny_model(self.config, self.seed, attn_implementation=plan.attention)
        use_plan(model, plan)
        if self._alter is not None:
            self._alter(model)
        return model

    @cached_property
    def own(self) -> Any:
        """Return the twin with transformers' own attention."""
        return tiny_model(self.config, self.seed, attn_implementation="eager")

    @cached_property
    @torch.enable_grad()  # also where the caller needs no gradients
    def alone(self) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return the log-probs of each row alone by transformers, and the gradients of their weighted sum."""
        log_probs = []
        for row, weights in zip(self.rows, self.weights, strict=True):
            logits = self.own(input_ids=row[None], use_cache=False).logits[0, :-1]
            found = logits.float().log_softmax(-1).gather(-1, row[1:, None])[:, 0]
            (found * weights).sum().backward()
            log_probs.append(found.detach())
        return log_probs, gradients_of(self.own)

    @torch.no_grad()
    def future(self) -> float:
        """Return how much a row's first logits depend on the tokens after them."""
        row = self.rows[1]
        whole, part = (self.own(input_ids=ids[None], use_cache=False).logits[0, :9] for ids in (row, row[:9]))
        return float((whole.log_softmax(-1) - part.log_softmax(-1)).abs().max())


def gradients_of(model: Any) -> dict[str, Tensor]:
    """Return a model's gradients by name."""
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def packed_log_probs(model: Any, rows: Sequence[Tensor]) -> list[Tensor]:
    """Return the log-probs of rows that go through a model packed, as in training."""
    sequences = PackedSequences.of([len(row) for row in rows], keep_scores=True)
    hidden = run_body(model, torch.cat(list(rows))[None], sequences.position_ids(), sequences)[0]
    ends = torch.tensor([len(row) for row in rows]).cumsum(0) - 1
    kept = torch.ones(len(hidden), dtype=torch.bool)
    kept[ends] = False
    found, _ = predicted_log_probs(model, hidden[kept], torch.cat([row[1:] for row in rows]))
    return list(found.split([len(row) - 1 for row in rows]))


def packed_findings(twin: Twin, model: Any) -> list[Finding]:
    """Compare packed rows with rows alone: log-probs, gradients, the order of rows, and the mode in which a model trains."""
    alone, gradients = twin.alone
    model.zero_grad()
    set_training(model, True)
    packed = packed_log_probs(model, twin.rows)
    sum((p * w).sum() for p, w in zip(packed, twin.weights, strict=True)).backward()  # type: ignore[union-attr]
    packed = [each.detach() for each in packed]
    own = gradients_of(model)
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
    """Return the greatest difference of two lists of tensors; infinite where a number is not finite."""
    found = max(float((a - b).abs().max()) if a.numel() else 0.0 for a, b in zip(ours, theirs, strict=True))
    return found if found == found else float("inf")


def find_plan(twin: Twin) -> tuple[ForwardPlan, list[Finding]]:
    """Return the first plan whose findings hold, and these. Raises Refusal where none does."""
    if twin.future() > BOUND:
        raise Refusal("a token's logits depend on the tokens after it, as in an encoder")
    reasons: list[str] = []
    for plan in _candidates(twin, PACKED, reasons):
        if plan is not None:
            return plan, packed_findings(twin, twin.model(plan))
    rows = ForwardPlan(by_rows=True)
    try:
        findings = packed_findings(twin, twin.model(rows))
    except FAILURES as error:
        raise Refusal(reasons[0] if reasons else first_line(error)) from error
    if wrong := [finding for finding in findings if not finding.holds]:
        raise Refusal(f"{reasons[0]}; by rows: {wrong[0].name}: differs by {wrong[0].value:.1g}")
    return rows, findings


def _candidates(twin: Twin, plan: ForwardPlan, reasons: list[str]) -> Iterator[ForwardPlan | None]:
    """Yield the plan if its findings hold, else those with one more mixer: the innermost module that leaks, then what contains it."""
    try:
        model = twin.model(plan)
        wrong = [finding for finding in packed_findings(twin, model) if not finding.holds]
    except FAILURES as error:
        reasons.append(first_line(error))
        return
    if not wrong:
        yield plan
        return
    leaking = leaking_modules(twin, model)
    name = leaking[0] if leaking else type(decoder_of(model)).__name__
    reasons.append(f"{name} mixes tokens: {wrong[0].name}: differs by {wrong[0].value:.1g}")
    if len(plan.mixers) < FOUND:
        for name in leaking:
            if name not in plan.mixers:
                yield from _candidates(twin, ForwardPlan((*plan.mixers, name)), reasons)


FAILURES = (Exception,)
"""What transformers' models raise where they are called as they do not expect: whatever it is, the model is refused in a line."""


@torch.no_grad()
def leaking_modules(twin: Twin, model: Any) -> list[str]:
    """Return the class of the first module whose output differs between packed rows and rows alone though its inputs agree.

    The classes of the modules around it follow, up to the decoder's layer.
    """
    set_training(model, False)
    packed, alone = (_calls(model, twin.rows, packed=together) for together in (True, False))
    for (name, given, theirs), (other, also, ours) in zip(alone, packed, strict=False):
        if name != other or theirs.shape != ours.shape or _is_torch(model.get_submodule(name)):
            continue
        if _differ(theirs, ours) and given.shape == also.shape and not _differ(given, also):
            around = [name.rsplit(".", up)[0] for up in range(name.count(".") + 1)]
            inner = [
                n for n in around if re.search(r"\.\d+\.", n) and not isinstance(model.get_submodule(n), nn.ModuleList)
            ]
            return list(dict.fromkeys(type(model.get_submodule(n)).__name__ for n in inner))
    return []


def _is_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")


def _differ(ours: Tensor, theirs: Tensor) -> bool:
    return ours.numel() > 0 and float((theirs - ours).abs().max()) > 1e-3 * float(ours.abs().max() + 1e-6)


def _calls(model: Any, rows: Sequence[Tensor], packed: bool) -> list[tuple[str, Tensor, Tensor]]:
    """Return each module call's inputs and output over all tokens, in the order in which the calls end."""
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
            sequences = PackedSequences.of([len(row) for row in part])
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


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Silence transformers, which warns of kernels that a tiny twin does not need."""
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
