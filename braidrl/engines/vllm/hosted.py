"""vLLM on the ranks that train: each rank hosts one worker and a scheduler of its own, and all of a group step alike.

rank 0   requests of both ─▶ scheduler ─▶ worker, half of each layer ╮ they add up each layer
rank 1   requests of both ─▶ scheduler ─▶ worker, half of each layer ╯
trained weights ──rank to rank──▶ vLLM's live parameters

Between generations the device is the trainer's: on CUDA vLLM sleeps, on a CPU the memory pages of caches and weights are freed.
"""

import os
import secrets
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
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
from braidrl.data.rows import Uid
from braidrl.engines.divided.spmd import SpmdEngine
from braidrl.engines.engine import Engine, EngineMemory, EngineSpec, T
from braidrl.engines.requests import Request, Response
from braidrl.engines.vllm.sleeping import DROPPED
from braidrl.engines.vllm.vllm_engine import VllmEngine
from braidrl.engines.vllm.vllm_worker import WeightsNotLive, live_parts
from braidrl.errors import UserError
from braidrl.weights.generation_layout import GenerationLayout
from braidrl.weights.in_place import GenerationWeights
from braidrl.weights.shards import Parts, WeightPart, storages


class RankExecutor(ExecutorWithExternalLauncher):
    """The executor of a worker inside a training rank."""

    identifier = ""
    """Names the shared memory of a run's workers, which by vLLM's default all runs of a machine share."""

    def _distributed_args(self) -> tuple[str, int, int]:
        if not dist.is_initialized():
            return UniProcExecutor._distributed_args(self)
        device = torch.cuda.current_device() if torch.cuda.is_available() else 0
        return f"file:///{self.identifier}", dist.get_rank(), device


class RanksInOrder(TorchFunctionMode):
    """Lets vLLM form its groups, which are neighbours, of ranks in another order."""

    def __init__(self, order: Tensor) -> None:
        super().__init__()
        self.order = order

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.arange and args == (len(self.order),) and not kwargs:
            return self.order.clone()
        return func(*args, **(kwargs or {}))


class RandomState:
    """Random numbers for the draws of vLLM, equal on the ranks of a group and apart from those of training."""

    def __init__(self, seed: int) -> None:
        self._devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(self._devices):
            torch.manual_seed(seed)
            self._keep()

    def _keep(self) -> None:
        self._states = torch.get_rng_state(), [torch.cuda.get_rng_state(device) for device in self._devices]

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let torch draw from these numbers, and continue after them the next time."""
        with torch.random.fork_rng(self._devices):
            torch.set_rng_state(self._states[0])
            for device, state in zip(self._devices, self._states[1], strict=True):
                torch.cuda.set_rng_state(state, device)
            yield
            self._keep()


class HostedVllmEngine(SpmdEngine, VllmEngine):
    """vLLM on one of the ranks that train."""

    def __init__(
        self, spec: EngineSpec, tokenizer: PreTrainedTokenizerBase, groups: Tensor | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:  # fmt: skip
        """Start vLLM; all ranks call this at the same time.

        Args:
            spec: The engine's settings.
            tokenizer: The model's tokenizer.
            groups: The ranks of each generation group, (groups, pipeline, tensor); None for a run of one process.
            group: This rank's generation group.

        Raises:
            UserError: vLLM does not take the model, or keeps its weights in a form that cannot be written to.
        """
        self._groups, self._group, self._environment = groups, group, spec.environment
        self.is_collective = group is not None
        folder, shape = Path(spec.model), {"tensor_parallel_size": spec.tensor, "pipeline_parallel_size": spec.pipeline}
        super().__init__(
            folder, tokenizer, spec.slots, spec.max_sequence_tokens, spec.seed, spec.dtype,
            {"enable_sleep_mode": True, **spec.options, **shape}, spec.reproducible, spec.adapts_rows,
        )  # fmt: skip
        runner = self._engine.model_executor.driver_worker.worker.model_runner
        self.model = runner.get_model()
        try:
            # Under adapters the weights stay what vLLM has read.
            adapted = spec.options.get("enable_lora")
            self._parts = {} if adapted else live_parts(self.model, self._expected, getattr(torch, spec.dtype))
        except WeightsNotLive as error:
            raise UserError(
                f"rollout.engines=0: ranks that train write into vLLM's weights, and {error}; leave rollout.engines out"
            ) from error
        if not torch.cuda.is_available():
            self._memory.may_leave, self._memory.caches = False, storages(runner.kv_caches)

    def _start(self, arguments: Mapping[str, Any]) -> LLMEngine:
        identifier, *_ = Ranks(self._group).all_gather("name of the shared memory", secrets.token_hex(8))
        RankExecutor.identifier = identifier
        self._random = RandomState(int(identifier[:8], 16))
        own = {"distributed_executor_backend": "external_launcher", "seed": 0}
        with undisturbed(self._environment), in_order(self._groups):
            config = EngineArgs(**{**arguments, **own}).create_engine_config()
            return LLMEngine(config, RankExecutor, self._share is not None, multiprocess_mode=False, **self._watching())

    def take_turns(self, trained: Parts, training: ParallelLayout, ranks: Ranks, layout: GenerationLayout) -> None:
        """Let generation and training weights take turns on the device; all ranks call this at the same time."""
        if torch.cuda.is_available():
            # vLLM's CUDA graphs know its tensors' addresses, which its sleep mode keeps.
            self._memory.level = DROPPED
            bring, stay = (lambda *_: self._memory.bring("weights")), (lambda _: None)
            self.phases = GenerationWeights(trained, training, ranks, self.parts, layout, occupy=bring, empty=stay)
        else:
            self.phases = GenerationWeights(trained, training, ranks, self.parts, layout)

    def parts(self) -> Mapping[str, WeightPart]:
        self._memory.bring("weights")
        return self._parts

    @property
    def memory(self) -> EngineMemory:
        caches = sum(storage.nbytes() for storage in self._memory.caches)
        return EngineMemory(self.model, caches, self.phases)

    def generate(
        self,
        requests: Iterable[Request],
        on_finished: Callable[[Response], None] | None = None,
        rows_to_end: Callable[[], Iterable[Uid]] | None = None,
    ) -> list[Response]:
        super().wake()
        return super().generate(requests, on_finished, rows_to_end)

    def run(self, work: Callable[[Engine], Coroutine[Any, Any, T]]) -> T:
        super().wake()
        return super().run(work)

    def step(self) -> list[Response]:
        if self._reproducible:
            return super().step()
        with self._random.used():
            return super().step()

    def wake(self) -> None:
        """Do nothing: weights wake when they are received, keys and values after them, so that less is there at once."""

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
def in_order(groups: Tensor | None) -> Iterator[None]:
    """Let vLLM form these groups, (groups, pipeline, tensor), of the ranks."""
    form = parallel_state.initialize_model_parallel

    def formed(*args: Any, **kwargs: Any) -> None:
        assert groups is not None
        with RanksInOrder(groups.flatten()):
            form(*args, **kwargs)

    if groups is not None:
        parallel_state.initialize_model_parallel = formed
    try:
        yield
    finally:
        parallel_state.initialize_model_parallel = form


@contextmanager
def undisturbed(environment: Mapping[str, str]) -> Iterator[None]:
    """Keep what vLLM's start would change for the trainer in the same process: environment, random state, threads."""
    before, set_threads = dict(os.environ), torch.set_num_threads
    os.environ.update({**environment, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    if not torch.cuda.is_available():
        # The environment variable is read when torch is imported.
        torch._dynamo.config.disable = True
    try:
        with torch.random.fork_rng():
            yield
    finally:
        torch.set_num_threads = set_threads
        for name in os.environ.keys() - before.keys():
            if not name.startswith("VLLM_"):
                del os.environ[name]
        os.environ.update({name: value for name, value in before.items() if not name.startswith("VLLM_")})
