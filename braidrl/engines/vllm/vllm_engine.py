"""vLLM as an engine of this process: it computes the steps; Braid keeps the rows, and in reproducible runs draws their
tokens.

add ──▶ waiting ──free slot──▶ vLLM ──step──▶ tokens, log-probs ──▶ Response
                               └── with rollout.tensor=2: two workers in separate processes

Only this file and `logits_processor` import vLLM; `vllm_worker` is Braid's part of vLLM's workers.
"""

import gc
import importlib.util
import itertools
import os
import secrets
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoConfig, PreTrainedTokenizerBase
from vllm import EngineArgs, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.metrics.loggers import StatLoggerBase

from braidrl.config import ImagesConfig
from braidrl.data.chat import end_ids_of
from braidrl.data.rows import Uid
from braidrl.data.token_columns import ROUTED_EXPERTS, column_of
from braidrl.data.vision import Vision
from braidrl.engines.engine import NOTHING_YET, EngineError, EngineSpec
from braidrl.engines.requests import RECENT, EngineRow, Response, draw_arguments, rows_to_begin
from braidrl.engines.stepping import SteppingEngine
from braidrl.engines.vllm.images import VllmImages
from braidrl.engines.vllm.logits_processor import DrawByRow
from braidrl.engines.vllm.sleeping import PARTS, VllmMemory
from braidrl.errors import UserError
from braidrl.training.processors import load_vision
from braidrl.weights.collective import Incoming
from braidrl.weights.file import WeightFile
from braidrl.weights.model_files import shapes_in_folder
from braidrl.weights.publisher import PolicyWeights, WeightSource, check_shapes

REPRODUCIBLE_SETTINGS = {
    # The engine core runs in the process that holds the rows, so that a step is one call.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # The newer runner does not support logits processors.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}
REFUSALS = (ValueError, TypeError, KeyError, AttributeError, AssertionError, NotImplementedError, ImportError)
"""Exceptions that vLLM raises for a model or a setting that it does not support; each part of it has its own."""
CPU_BLOCK = 128
"""Tokens per block of keys and values on the CPU."""


class VllmEngine(SteppingEngine):
    """An engine that starts with the model of the spec's folder; its `options` are arguments of vLLM's `EngineArgs`."""

    def __init__(self, spec: EngineSpec, tokenizer: PreTrainedTokenizerBase) -> None:
        """Start vLLM. Raises UserError if it does not support the model."""
        folder = Path(spec.model)
        super().__init__(tokenizer, end_ids_of(folder, tokenizer), spec.max_sequence_tokens, spec.seed)
        self.spec, self.slots = spec, spec.slots
        self._expected = shapes_in_folder(folder)
        self.recent: deque[float] = deque(maxlen=RECENT)
        """The parts of their limits that recent rows have drawn."""
        self.preemptions = 0
        """Rows that vLLM has preempted, counted where rows begin by the room for them."""
        arguments = arguments_of(spec)
        # vLLM collects garbage four times while it starts, a quarter of its start time; imported objects are no
        # garbage.
        gc.freeze()
        with refusals_in_a_line():
            self._engine = self._start(arguments, [partial(PreemptionLog, self)] if spec.adapts_rows else None)
            if spec.reproducible and "logits_processors" not in arguments:
                self._engine.collective_rpc("draw_drafts")
        vision = vision_of(spec)
        self._images = None if vision is None else VllmImages(vision, self._engine.renderer)
        self._memory = VllmMemory(self._engine, bool(spec.options.get("enable_sleep_mode")))
        self._rows: dict[str, EngineRow] = {}
        """The rows that vLLM has, by their names there."""
        self._names = itertools.count()
        self._adapters: dict[str | None, LoRARequest] = {}
        """The adapters with which rows are drawn, where adapters alone are sent: by policy, or under None for all."""
        self._prepared = set[str]()
        """The columns per token that the workers can compute."""
        self._failure: EngineError | None = None
        """The error after which no token may be drawn, because the version of the weights is unknown."""
        self._is_given_again = False
        """Whether the weights are given once more after a failure, as that of another engine that shared the transfer.
        """

    def _start(self, arguments: Mapping[str, Any], loggers: list[Any] | None) -> LLMEngine:
        options = {"disable_log_stats": loggers is None, **arguments}
        return LLMEngine.from_engine_args(EngineArgs(**options), stat_loggers=loggers)

    @property
    def in_flight(self) -> int:
        return len(self._rows)

    def publish(self, version: int, source: WeightSource | None = None) -> None:
        """Publish weights; each vLLM worker loads its part. Raises ValueError for a source that workers cannot read."""
        load: Callable[[], object] | None = None
        policy: str | None = None
        if isinstance(source, PolicyWeights):
            policy, source = source.role, source.source
        if isinstance(source, WeightFile) and source.is_adapter:
            loaded = self._adapters.get(policy)
            named = policy or "trained", loaded.lora_int_id if loaded else 1 + len(self._adapters), str(source.folder)
            self._adapters[policy] = LoRARequest(*named)
            load = partial(self._engine.add_lora, LoRARequest(*named, load_inplace=True))
        elif isinstance(source, WeightFile):
            check_shapes(source.shapes(), self._expected)
            load = partial(self._engine.collective_rpc, "take_weights", args=(str(source.path),))
        elif isinstance(source, Incoming):
            load = partial(self._engine.collective_rpc, "receive_weights", args=(asdict(source.notice),))
        elif source is not None:
            raise ValueError("vLLM's workers take weights from a file, or in a process group that they join")
        if self.phases is not None:
            self.phases.leave()
        self._memory.bring("weights")
        try:
            answers = None if load is None else load()
            if isinstance(answers, list) and any(answers):
                raise RuntimeError(next(filter(None, answers)))
        except Exception as error:
            self._failure = EngineError(f"vLLM could not take the weights of version {version}: {error}")
            raise self._failure from error
        if self._images is not None:
            # Images encoded with the earlier weights; a worker clears its cache, which the scheduler does not know.
            self._engine.reset_encoder_cache()
        self.version, self._failure, self._is_given_again = version, None, False

    def _accept(self, row: EngineRow) -> None:
        if row.request.images:
            if self._images is None:
                raise UserError(
                    f"row {row.request.uid} has images, and vLLM's model takes none; use a multimodal model"
                )
            self._images.check(row.request.images)
        super()._accept(row)

    def step(self) -> list[Response]:
        """Fill free slots, then run a step of vLLM."""
        count = min(len(self._waiting), self.slots - len(self._rows))
        if count and self.spec.adapts_rows:
            cache = self._engine.vllm_config.cache_config
            # vLLM reserves one block.
            capacity, waiting = (cache.num_gpu_blocks - 1) * cache.block_size, itertools.islice(self._waiting, count)
            count = rows_to_begin(capacity, cache.block_size, self.recent, self._rows.values(), waiting)
        for _ in range(count):
            self._begin(self._waiting.popleft())
        ended = list[EngineRow]()
        for output in self._engine.step() if self._rows else ():
            row = self._rows.get(output.request_id)
            # vLLM may still return a token for a row that was ended here.
            if row is None:
                continue
            is_finished, (part,) = output.finished, output.outputs
            for token, log_probs in zip(part.token_ids, part.logprobs, strict=True):
                row.log_probs.append(log_probs[token].logprob)
                self.tokens_generated += 1
                if row.record_token(token):
                    is_finished = True
                    break
            if is_finished:
                if not output.finished:
                    self._engine.abort_request([row.name])
                del self._rows[row.name]
                self.recent.append(len(row.tokens) / row.limit)
                ended.append(row)
        self._take_values(ended)
        return self._done([row.finished() for row in ended])

    def _take_values(self, ended: Sequence[EngineRow]) -> None:
        """Set the columns per token of ended rows, which one of vLLM's workers has computed."""
        by_name = {row.name: row for row in ended if row.request.columns and row.name}
        if not by_name:
            return
        for of_worker in self._engine.collective_rpc("take_values", args=(list(by_name),)):
            for name, columns in of_worker.items():
                row = by_name[name]
                # vLLM may have drawn more tokens before it was notified of the row's end.
                sizes = len(row.request.prompt), len(row.tokens)
                row.per_token |= {key: values[: column_of(key).entries(*sizes)] for key, values in columns.items()}

    def _begin(self, row: EngineRow) -> None:
        request, row.name = row.request, str(next(self._names))
        if missing := [name for name in request.columns if name not in self._prepared]:
            if refusals := list(filter(None, self._engine.collective_rpc("prepare_columns", args=(missing,)))):
                raise UserError(f"rollout.engine=vllm: {refusals[0]}")
            self._prepared.update(missing)
        # The salt prevents the reuse of prompts computed with other weights.
        salt = f"{self.version} {request.policy or ''}"
        prompt: Any = {"prompt_token_ids": request.prompt.tolist(), "cache_salt": salt}
        if request.images and self._images is not None:
            prompt = self._images.prompt(request.prompt, request.images, salt)
        sampling = request.sampling
        drawn: dict[str, Any] = {"temperature": 0.0}
        if self.spec.reproducible:
            # `DrawByRow` draws by these; else vLLM draws.
            drawn = {"extra_args": draw_arguments(row, self.seed)}
        elif not sampling.takes_likeliest:
            drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
        params = SamplingParams(
            max_tokens=row.limit,
            stop_token_ids=list(row.stop_token_ids),
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            output_kind=RequestOutputKind.DELTA,
            # Nothing is recorded of a token whose keys and values come from another row.
            skip_reading_prefix_cache=ROUTED_EXPERTS in request.columns,
            **drawn,
        )
        adapter = self._adapters.get(request.policy) or self._adapters.get(None)
        self._engine.add_request(row.name, prompt, params, lora_request=adapter)
        self._rows[row.name] = row

    def abort(self, uid: Uid) -> Response:
        for row in [*self._rows.values(), *self._waiting]:
            if row.request.uid == uid:
                if self._rows.pop(row.name, None) is None:
                    self._waiting.remove(row)
                else:
                    self._engine.abort_request([row.name])
                    self._take_values([row])
                return self._done([row.finished(aborted=True)])[0]
        raise KeyError(f"row {uid} is not under way")

    def recover(self) -> int:
        if self._failure is not None and self._is_given_again:
            raise self._failure
        try:
            self._engine.collective_rpc("check_health")
        except Exception as error:
            raise EngineError(f"vLLM cannot continue: {error}") from error
        self._is_given_again = self._failure is not None
        return NOTHING_YET if self._is_given_again else self.version

    def clear(self, release: bool = True) -> None:
        if self._rows:
            self._engine.abort_request(list(self._rows))
            self._take_values(list(self._rows.values()))
        self._rows.clear()
        self._waiting.clear()
        self._under_way.clear()

    def sleep(self) -> None:
        super().sleep()
        self._memory.leave()

    def wake(self) -> None:
        self._memory.bring(*PARTS)


class PreemptionLog(StatLoggerBase):
    """A vLLM logger that counts preempted rows, which drew more tokens than expected."""

    def __init__(self, engine: VllmEngine, vllm_config: Any, engine_index: int = 0) -> None:
        self._engine = engine

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        if iteration_stats is not None and (rows := iteration_stats.num_preempted_reqs):
            self._engine.preemptions += rows
            self._engine.recent.append(1.0)

    def log_engine_initialized(self) -> None:
        """Do nothing: vLLM requires the method."""


@contextmanager
def refusals_in_a_line() -> Iterator[None]:
    """Raise UserError if vLLM refuses a model or a setting."""
    try:
        yield
    except REFUSALS as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise UserError(f"rollout.engine=vllm: {kind}{' '.join(str(error).split())}") from error


@contextmanager
def ranks_of_node(spec: EngineSpec) -> Iterator[None]:
    """Hold this node's ranks of an engine that another node schedules. The process ends when one of them does."""
    with refusals_in_a_line():
        executor = MultiprocExecutor(EngineArgs(**arguments_of(spec)).create_engine_config(headless=True))
    executor.register_failure_callback(partial(os._exit, 1))
    try:
        yield
    finally:
        executor.shutdown()


def key_numbers(config: Any) -> int:
    """Return the number of elements of a token's keys in the widest layer; Gemma 4 has heads of several widths."""
    layers = getattr(config, "per_layer_config", None)
    layers_of_model = [layers[n] for n in range(config.num_hidden_layers)] if layers else [config]
    widths = [
        getattr(layer, "head_dim", None) or config.hidden_size // config.num_attention_heads
        for layer in layers_of_model
    ]
    return int(max(layer.num_key_value_heads * width for layer, width in zip(layers_of_model, widths, strict=True)))


def vision_of(spec: EngineSpec) -> Vision | None:
    """Return the vision of an engine's model; None for a text-only model."""
    return None if spec.images is None else load_vision(Path(spec.model), ImagesConfig(**spec.images))


def image_arguments(vision: Vision) -> dict[str, Any]:
    """Return the arguments of vLLM's engine for a multimodal model. Raises UserError without torchvision."""
    if importlib.util.find_spec("torchvision") is None:
        raise UserError(
            f"rollout.engine=vllm: vLLM's multimodal models need torchvision, which {sys.executable} lacks; install "
            "the one of its torch, or write rollout.engine=embedded"
        )
    # vLLM computes room for the largest image from its own processor, which needs a tokenizer.
    size = {"mm_processor_kwargs": {"size": dict(vision.processor.size)}} if vision.family.resizes else {}
    return {
        "skip_tokenizer_init": False,
        "limit_mm_per_prompt": {"video": 0, "audio": 0},
        # Braid's pixels are normalized; by default vLLM's are not, and its vision tower normalizes them.
        "mm_device_do_normalize": False,
        "skip_mm_profiling": not torch.cuda.is_available(),
        **size,
    }


def arguments_of(spec: EngineSpec) -> dict[str, Any]:
    """Return the arguments of vLLM's engine: Braid's, overridden by the user's options; set the environment variables
    that they need.
    """
    if spec.reproducible:
        os.environ.update(REPRODUCIBLE_SETTINGS)
    options, config = spec.vllm_options, AutoConfig.from_pretrained(spec.model, local_files_only=True)
    arguments: dict[str, Any] = {
        "model": spec.model,
        "skip_tokenizer_init": True,
        "dtype": spec.dtype,
        "max_num_seqs": spec.slots,
        "max_model_len": spec.max_sequence_tokens,
        "worker_extension_cls": "braidrl.engines.vllm.vllm_worker.TakesWeights",
    }
    if (vision := vision_of(spec)) is not None:
        arguments |= image_arguments(vision)
    if config.model_type == "deepseek_v3" and not hasattr(config, "scoring_func"):
        # The router of transformers' class. The hub's configurations name it; without a name vLLM takes another one.
        arguments["hf_overrides"] = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    if not torch.cuda.is_available():
        # Keys and values of `slots` rows of maximum length, in the layers of a draft too, as far as there is memory.
        drafts = options.get("speculative_config") or {}
        longest = spec.max_sequence_tokens + drafts.get("num_speculative_tokens", 0)
        positions = (spec.slots * -(-longest // CPU_BLOCK) + 1) * CPU_BLOCK
        text = config.get_text_config()  # including a multimodal model
        keys = text.num_hidden_layers * key_numbers(text)
        if "model" in drafts:
            draft = AutoConfig.from_pretrained(drafts["model"], local_files_only=True).get_text_config()
            keys += draft.num_hidden_layers * key_numbers(draft)
        elif drafts.get("method") == "mtp":
            keys += (getattr(text, "num_nextn_predict_layers", None) or 1) * key_numbers(text)
        token_bytes = 2 * keys * getattr(torch, spec.dtype).itemsize
        room = psutil.virtual_memory().available // 2
        arguments |= {"kv_cache_memory_bytes": min(int(token_bytes * positions), room), "enforce_eager": True}
        # vLLM refuses the sleep mode but accepts its calls: it pauses and wakes part by part, and its memory stays.
        options.pop("enable_sleep_mode", None)
    by_row = {"seed": 0, "logprobs_mode": "processed_logits", "async_scheduling": False}
    # Where vLLM speculates it refuses them, and its workers are told to draw.
    by_row |= {} if options.get("speculative_config") else {"logits_processors": [DrawByRow]}
    # Engines with the same seed would draw equal samples of a prompt.
    return {**arguments, **(by_row if spec.reproducible else {"seed": secrets.randbits(31)}), **options}
