"""vLLM on the ranks that train: each rank hosts one worker and one scheduler, and all ranks of a group make the same
steps.

rank 0   requests of both ─▶ scheduler ─▶ worker, half of each layer ╮ they add up each layer
rank 1   requests of both ─▶ scheduler ─▶ worker, half of each layer ╯
trained weights ──rank to rank──▶ vLLM's live parameters

Between generations the device is the trainer's: on CUDA vLLM sleeps, on a CPU the memory pages of caches and weights
are freed.
"""

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedTokenizerBase
from vllm import EngineArgs
from vllm.distributed import parallel_state
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher, UniProcExecutor

from braidrl.cluster.world import Ranks
from braidrl.config.layout import ParallelLayout
from braidrl.engines.engine import EngineMemory, EngineSpec
from braidrl.engines.requests import Response
from braidrl.engines.vllm.sleeping import DROPPED, PARTS
from braidrl.engines.vllm.vllm_engine import VllmEngine
from braidrl.engines.vllm.vllm_worker import WeightsNotLive, live_parts
from braidrl.errors import UserError
from braidrl.weights.generation_layout import GenerationLayout
from braidrl.weights.in_place import GenerationWeights
from braidrl.weights.model_files import HubNames, model_in
from braidrl.weights.shards import Parts, WeightPart, storages


class RankExecutor(ExecutorWithExternalLauncher):
    """The executor of a worker inside a training rank."""

    identifier = ""
    """Names the shared memory of a run's workers; by vLLM's default all runs of a machine share it."""

    def _distributed_args(self) -> tuple[str, int, int]:
        if not dist.is_initialized():
            return UniProcExecutor._distributed_args(self)
        device = torch.cuda.current_device() if torch.cuda.is_available() else 0
        return f"file:///{self.identifier}", dist.get_rank(), device


class HostedVllmEngine(VllmEngine):
    """vLLM on one of the ranks that train."""

    def __init__(
        self,
        spec: EngineSpec,
        tokenizer: PreTrainedTokenizerBase,
        groups: Tensor | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Start vLLM; all ranks call this at the same time.

        `groups` are the ranks of each generation group, (groups, pipeline, tensor), None for a run of one process;
        `group` is this rank's. Raises UserError if vLLM does not support the model, or stores its weights in a form
        that cannot be written to.
        """
        self._groups, self.group = groups, group
        super().__init__(replace(spec, options={"enable_sleep_mode": True, **spec.options}), tokenizer)
        runner = self._engine.model_executor.driver_worker.worker.model_runner
        self.model = runner.get_model()
        try:
            # With adapters the base weights stay as vLLM has read them.
            adapted = spec.options.get("enable_lora")
            trained = model_in(spec.model)
            dtype = getattr(torch, spec.dtype)
            self._parts = {} if adapted else live_parts(self.model, trained, HubNames(trained), dtype)
        except WeightsNotLive as error:
            raise UserError(
                f"rollout.engines=0: ranks that train write into vLLM's weights, and {error}; leave rollout.engines out"
            ) from error
        if not torch.cuda.is_available():
            self._memory.may_leave, self._memory.caches = False, storages(runner.kv_caches)

    def _start(self, arguments: Mapping[str, Any], loggers: list[Any] | None) -> LLMEngine:
        identifier, *_ = Ranks(self.group).all_gather("name of the shared memory", secrets.token_hex(8))
        RankExecutor.identifier = identifier
        self._draw_seed = int(identifier[:8], 16)
        options = {"distributed_executor_backend": "external_launcher", "seed": 0}
        with starting_vllm(self.spec.environment, self._groups):
            config = EngineArgs(**{**arguments, **options}).create_engine_config()
            return LLMEngine(config, RankExecutor, loggers is not None, multiprocess_mode=False, stat_loggers=loggers)

    def take_turns(self, trained: Parts, training: ParallelLayout, ranks: Ranks, layout: GenerationLayout) -> None:
        if torch.cuda.is_available():
            # vLLM's CUDA graphs know its tensors' addresses, which its sleep mode keeps.
            self._memory.level = DROPPED
            bring, stay = (lambda *_: self._memory.bring("weights")), (lambda _: None)
            self.phases = GenerationWeights(trained, training, ranks, self.parts, layout, occupy=bring, empty=stay)
        else:
            super().take_turns(trained, training, ranks, layout)

    def parts(self) -> Mapping[str, WeightPart]:
        self._memory.bring("weights")
        return self._parts

    @property
    def memory(self) -> EngineMemory:
        return EngineMemory(self.model, sum(storage.nbytes() for storage in self._memory.caches))

    def step(self) -> list[Response]:
        self._memory.bring(*PARTS)
        if self.spec.reproducible:
            return super().step()
        # vLLM samples with random numbers that are equal on the ranks of a group, and does not change those of
        # training.
        self._draw_seed += 1
        with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
            torch.manual_seed(self._draw_seed)
            return super().step()

    def wake(self) -> None:
        """Do nothing: receiving weights wakes them, and the next step wakes the cache, for a lower peak of memory."""

    def sleep(self) -> None:
        if self.phases is not None:
            self.phases.leave()
        super().sleep()

    def close(self) -> None:
        core: Any = self._engine.engine_core
        if self._groups is None:
            core.shutdown()
        elif core._finalizer.detach() is not None:
            # vLLM's own shutdown would also end the process group of the ranks.
            self._engine.model_executor.shutdown()
            parallel_state.destroy_model_parallel()
            parallel_state.get_world_group().destroy()
            parallel_state._WORLD = None


@contextmanager
def starting_vllm(environment: Mapping[str, str], groups: Tensor | None) -> Iterator[None]:
    """Restore the trainer's settings that vLLM's start would change in the same process: environment, random state,
    threads.

    vLLM forms groups of neighbours. Inside this context it forms these groups of ranks instead, (groups, pipeline,
    tensor).
    """
    before, set_threads, form = dict(os.environ), torch.set_num_threads, parallel_state.initialize_model_parallel
    order = torch.empty(0) if groups is None else groups.flatten()

    class RanksInOrder(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.arange and args == (len(order),) and not kwargs:
                return order.clone()
            return func(*args, **(kwargs or {}))

    def formed(*args: Any, **kwargs: Any) -> None:
        with RanksInOrder():
            form(*args, **kwargs)

    os.environ.update({**environment, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    if not torch.cuda.is_available():
        # The environment variable is read when torch is imported.
        torch._dynamo.config.disable = True
    if groups is not None:
        parallel_state.initialize_model_parallel = formed
    try:
        with torch.random.fork_rng():
            yield
    finally:
        parallel_state.initialize_model_parallel, torch.set_num_threads = form, set_threads
        for name in os.environ.keys() - before.keys():
            if not name.startswith("VLLM_"):
                del os.environ[name]
        os.environ.update({name: value for name, value in before.items() if not name.startswith("VLLM_")})
