"""Logits from hidden states: the output layer with a model's scale and soft cap.

    logits = cap · tanh(scale · (hidden Wᵀ) / cap)          Cohere, Granite, Falcon H1: a scale; Gemma, NanoChat: a cap

Scale and cap are measured on the model's forward, not read from its configuration. Other heads (with a bias or further
layers) run as the model's forward, one chunk of tokens at a time.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from braidrl.training.compute.log_probs import CHUNK_BYTES, chunks, linear_log_probs
from braidrl.training.decoders.body import decoder_of

PROBED = 8
HEAD = "logit_head"
"""Attribute of a model with the cached result of `head_of`."""


@dataclass(frozen=True)
class Head:
    """A model's scale and soft cap for the product of hidden states and output weight."""

    scale: float = 1.0
    cap: float | None = None
    is_own: bool = False
    """True if the model's forward must compute logits."""

    def shape(self, product: Tensor) -> Tensor:
        """Return logits from hidden Wᵀ."""
        scaled = product if self.scale == 1.0 else product * self.scale
        return scaled if self.cap is None else self.cap * torch.tanh(scaled / self.cap)


@torch.no_grad()
def head_of(model: Any) -> Head:
    """Return a causal model's head, measured once by a small probe in place of its output; works without weights."""
    cached: Head | None = getattr(model, HEAD, None)
    if cached is not None:
        return cached
    head = Head(is_own=True)
    output: Any = model.get_output_embeddings()
    if isinstance(output, nn.Linear) and getattr(output, "bias", None) is None:
        generator = torch.Generator().manual_seed(0)
        probe = nn.Linear(output.in_features, PROBED, bias=False, device="cpu", dtype=torch.float64)
        probe.weight.copy_(torch.randn(probe.weight.shape, generator=generator, dtype=torch.float64))
        hidden = torch.randn(1, PROBED, output.in_features, generator=generator, dtype=torch.float64)
        product = hidden @ probe.weight.T
        owner, name = next(
            (module, name) for module in model.modules() for name, child in module.named_children() if child is output
        )
        setattr(owner, name, probe)
        try:
            small, large = (model_logits(model, hidden * factor).double() / factor for factor in (1e-3, 1e6))
        except (RuntimeError, TypeError, AttributeError, ValueError, NotImplementedError):
            small = large = product[:0]
        finally:
            setattr(owner, name, output)
        if small.shape == product.shape:
            # Small inputs show only the scale, large inputs only the cap.
            scale = float((small * product).sum() / (product * product).sum())
            scale = 1.0 if abs(scale - 1) < 1e-7 else scale
            linear = torch.allclose(large, scale * product, rtol=1e-5)
            measured = Head(scale, None if linear else float(large.abs().max()) * 1e6)
            agrees = torch.allclose(small, measured.shape(product * 1e-3) / 1e-3, rtol=1e-4, atol=1e-6)
            if agrees and torch.allclose(large, measured.shape(product * 1e6) / 1e6, rtol=1e-4):
                head = measured
    setattr(model, HEAD, head)
    return head


def logits_of(model: Any, hidden: Tensor) -> Tensor:
    """Return the logits (..., V) of hidden states (..., D)."""
    head = head_of(model)
    if head.is_own:
        return model_logits(model, hidden.reshape(1, -1, hidden.shape[-1])).unflatten(1, hidden.shape[:-1])[0]
    output = model.get_output_embeddings()
    return head.shape(output(hidden.to(output.weight.dtype)))


def predicted_log_probs(
    model: Any,
    hidden: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    with_entropy_grad: bool = False,
    compiled: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return log-probs of `targets` (N,) and entropies, as `linear_log_probs`, of hidden states (N, D)."""
    head, output = head_of(model), model.get_output_embeddings()
    if head.is_own:

        def of_chunk(states: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
            logits = model_logits(model, states[None])[0]
            log_softmax = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(-1)
            entropy = -(log_softmax.exp() * log_softmax).sum(-1)
            return log_softmax.gather(-1, ids[:, None])[:, 0], entropy if with_entropy_grad else entropy.detach()

        # The model's own forward, one chunk at a time; the backward pass recomputes chunks.
        elements = CHUNK_BYTES // torch.promote_types(hidden.dtype, torch.float32).itemsize
        parts = chunks(len(hidden), model.config.get_text_config().vocab_size, elements) or [slice(0, 0)]
        outputs = [checkpoint(of_chunk, hidden[part], targets[part], use_reentrant=False) for part in parts]
        log_probs, entropies = zip(*outputs, strict=True)
        return torch.cat(log_probs), torch.cat(entropies)
    # logits over temperature: scale · product / T, or cap · tanh(scale · product / cap) / T
    cap = None if head.cap is None else head.cap / temperature
    # some decoders (Mamba) end in float32
    return linear_log_probs(
        hidden.to(output.weight.dtype),
        output.weight,
        targets,
        temperature / head.scale,
        with_entropy_grad,
        compiled=compiled,
        cap=cap,
    )


def model_logits(model: Any, hidden: Tensor) -> Tensor:
    """Return the logits (1, N, V) of hidden states (1, N, D) from the model's forward, in which the decoder returns
    these states.
    """
    # OPT's forward calls the decoder within its base model
    holders = {decoder_of(model), model.base_model} - {model}
    for holder in holders:
        holder.forward = lambda *_, **__: GivenStates(hidden)
    try:
        ids = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
        logits: Tensor = type(model).forward(model, input_ids=ids, use_cache=False).logits
    finally:
        for holder in holders:
            del holder.forward
    return logits


@dataclass(frozen=True)
class GivenStates:
    """A decoder output with these hidden states; all other attributes are None."""

    last_hidden_state: Tensor

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: Any) -> Any:
        return self.last_hidden_state if index == 0 else ()
