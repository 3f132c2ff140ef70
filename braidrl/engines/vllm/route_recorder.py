"""The experts that vLLM's routers choose, as a column per token of the rows that ask for it.

router ──chosen experts──▶ buffer of a step, (tokens, layers, k) ──by row and position──▶ (P + T - 1, L, k) of a row

vLLM computes the tokens of a row that it has preempted again: they keep the experts that drew the row's tokens. Choices
are recorded before vLLM renumbers experts to balance devices.

Shapes: P prompt tokens, T drawn tokens, L layers with experts, k experts of a token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    RoutedExpertsCapturer,
    bind_routed_experts_capturer,
)

from braidrl.data.token_columns import ROUTED_EXPERTS
from braidrl.engines.requests import parse_draws


@dataclass
class RowRoutes:
    """The routes of a row's first tokens."""

    parts: list[Tensor] = field(default_factory=list)
    count: int = 0

    def add(self, first: int, routes: Tensor) -> None:
        """Add the routes (N, L, k) of the tokens from index `first` on; those of tokens computed again are dropped."""
        self.parts.append(routes[self.count - first :])
        self.count += len(self.parts[-1])


class RouteRecorder:
    """Records the routes of a worker's rows, from the next step on."""

    def __init__(self, model_runner: Any, config: Any) -> None:
        """Raises ValueError where vLLM replays recorded kernels, which call no recorder, has routers of its own, or
        drafts tokens.
        """
        if not config.model_config.enforce_eager:
            raise ValueError("routes are recorded only in eager mode; write rollout.vllm.enforce_eager=true")
        if config.speculative_config:
            raise ValueError("routes of rejected drafts cannot be told apart; remove rollout.vllm.speculative_config")
        model = model_runner.get_model()
        self._runner, self._execute = model_runner, model_runner.execute_model
        self._capturer = RoutedExpertsCapturer(model_runner.max_num_tokens, config)
        bind_routed_experts_capturer(model, self._capturer)
        self._layers = sorted(module.layer_id for module in model.modules() if isinstance(module, MoERunner))
        self._dtype = torch.uint8 if config.model_config.get_num_experts() <= 256 else torch.int16
        self._rows: dict[str, RowRoutes] = {}
        model_runner.execute_model = self._recorded_step

    def take_values(self, rows: Sequence[str]) -> dict[str, dict[str, Tensor]]:
        """Return and forget the routes of rows, on the CPU."""
        kept = {row: self._rows.pop(row) for row in rows if row in self._rows}
        return {row: {ROUTED_EXPERTS: torch.cat(routes.parts).cpu()} for row, routes in kept.items()}

    def _recorded_step(self, scheduled: Any, *arguments: Any, **named: Any) -> Any:
        result = self._execute(scheduled, *arguments, **named)
        if scheduled.total_num_scheduled_tokens:
            self._record(scheduled.num_scheduled_tokens)
        return result

    def _record(self, scheduled: Mapping[str, int]) -> None:
        """Add the routes of a step in which vLLM has computed `scheduled` tokens of each request."""
        names = [name for name in self._runner.input_batch.req_ids if name in scheduled]
        counts = [scheduled[name] for name in names]
        routes = self._capturer.device_buffer[: sum(counts), self._layers].to(self._dtype)
        for name, computed in zip(names, routes.split(counts), strict=True):
            state = self._runner.requests[name]
            draws = parse_draws(state.sampling_params.extra_args)
            if ROUTED_EXPERTS in draws.columns:
                self._rows.setdefault(draws.name, RowRoutes()).add(state.num_computed_tokens, computed)
