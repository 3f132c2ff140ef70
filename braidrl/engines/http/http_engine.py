"""Another project's server as an engine over HTTP: it is sent token ids, and returns token ids and log-probs.

submit ──▶ server ─▶ tokens, log-probs ─▶ Response  abort: the server ends what it draws, and answers with what there is

A row is one request and has one version of the weights; `ResumingEngine` requests the remaining tokens of a preempted
row.
"""

import asyncio
import base64
import io
import math
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit
from uuid import uuid4

import torch
from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from braidrl.cluster.process_groups import address_towards
from braidrl.cluster.world import Ranks
from braidrl.data.rows import Uid
from braidrl.data.token_columns import LOG_PROBS, VERSIONS, returned_columns, token_columns
from braidrl.data.vision import Vision
from braidrl.engines.engine import NOTHING_YET, EngineError, Load, check_idle
from braidrl.engines.http.dialects import ColumnCall, ColumnReader, Dialect, Json, SeenPrompt, ServerCall, ServerNeeds
from braidrl.engines.requests import EngineRow, Request, Response, row_of
from braidrl.errors import UserError, printable, shown
from braidrl.observe.stalls import WORK
from braidrl.parsing import parse_json
from braidrl.weights.collective import OfferedWeights, WeightOffer
from braidrl.weights.file import WeightFile, stored_weights
from braidrl.weights.model_files import HubNames
from braidrl.weights.publisher import WeightSource, check_shapes

ABORT_AGAIN_S = 0.1
"""Seconds between aborts of one request: it may still be on its way to the server, so it is aborted until it is
answered.
"""
SETTINGS_BYTES, ANSWER_BYTES, TOKEN_BYTES, PIECE_BYTES = 64 << 20, 1 << 20, 4 << 10, 1 << 16
"""Bytes of an answer without tokens, at most; of one with tokens beside them, and for each that was asked for; and of
the pieces in which an answer is read.
"""
MOST_UNFINISHED = 3
"""How often a server may end one row before its end, or fail to draw it."""
STARTING = (502, 503, 504)
"""Answers of a server, or of one before it, that is not ready."""
LOG_PROB_ROUNDING = 1e-3
KEPT_IMAGES = 16
"""Images that an engine keeps as text, for the other samples of a group."""
IDLE_S = 2.0
"""Seconds after which an idle connection is not used again; vLLM's server closes one after 5 s."""


class ServerFailure(EngineError):
    """An answer that reports a failure of the server, not its start."""


class MissingCall(UserError):
    """An answer of the server that says it does not have a call, or was started without it."""


@dataclass(frozen=True)
class ServerSpec:
    """The run's knowledge of a server and its model."""

    dialect: Dialect
    tokenizer: PreTrainedTokenizerBase
    end_ids: tuple[int, ...]
    shapes: Mapping[str, torch.Size]
    """Shape of every tensor, a tied one under each of its names."""
    slots: int
    needs: ServerNeeds
    seed: int = 0
    within: Path | None = None
    """The parent of the folders from which the server reads weights."""
    hub_names: HubNames | None = None
    """The conversion to the names that the server's loaders know, if the model's names differ."""
    device: torch.device = field(default_factory=partial(torch.device, "cpu"))
    """The run's device, from which weights are sent to a server that receives them over the network."""
    limit_s: float = 600.0
    """Time limit of a request, in seconds."""
    vision: Vision | None = None
    """The image processor of a model that sees."""

    @property
    def vocabulary(self) -> int:
        """The number of the model's tokens: the rows of its embedding, possibly more than the tokenizer's."""
        of_tokenizer = len(self.tokenizer)
        return min((s[0] for s in self.shapes.values() if len(s) == 2 and s[0] >= of_tokenizer), default=of_tokenizer)

    def store(self, tensors: Iterable[tuple[str, Tensor]]) -> WeightFile:
        """Write weights to the folder that the server reads, or to the memory from which they are sent."""
        return stored_weights(tensors, not self.needs.receives, self.within)


class HttpEngine:
    """An engine for one server.

    It belongs to the event loop in which it is started.
    """

    def __init__(self, url: str, spec: ServerSpec) -> None:
        self.url, self.spec = url.rstrip("/"), spec
        self.version, self.max_sequence_tokens = 0, spec.needs.tokens
        self.weights = secrets.token_hex(8)
        """The label of the server's weights, unique over all runs."""
        self._is_labelled = False
        self._unread: list[str] = []
        """The names of rows with columns in the server's workers that were not read."""
        self._held_weights: OfferedWeights | None = None
        """The weights that the server received over the network from the run's ranks."""
        self._session: ClientSession | None = None
        self._rows: dict[Uid, tuple[EngineRow, asyncio.Future[dict[str, Any]]]] = {}
        """The rows that the server draws, and their pending requests."""
        self._aborted: set[Uid] = set()
        self._awake = asyncio.Event()
        self._awake.set()
        self._failure: EngineError | None = None
        self._unfinished = Counter[Uid]()
        """How often the server has not drawn a row to its end, though it answered."""
        self._data_uri = lru_cache(maxsize=KEPT_IMAGES)(self._written_image)

    async def start(self) -> None:
        """Connect to the server.

        Raises UserError if it does not answer, or was started with options that Braid cannot train with.
        """
        # Connections are not reused after a training step: servers close idle ones, and this process does not notice it
        # meanwhile.
        connector = TCPConnector(limit=0, keepalive_timeout=IDLE_S)
        headers = {"Accept-Encoding": "identity"}
        self._session = ClientSession(
            connector=connector, timeout=ClientTimeout(total=self.spec.limit_s), headers=headers
        )
        setting, dialect = f"rollout.servers: {self.url}", self.spec.dialect
        try:
            info = await self.ask("GET", dialect.settings)
        except UserError:
            raise UserError(
                f"{setting} has no {dialect.settings}, and could not be given weights: start it with {dialect.start}"
            ) from None
        except EngineError as error:
            raise UserError(f"{error}; start it, or correct rollout.servers") from error
        try:
            missing = dialect.missing(info, self.spec.needs)
        except (LookupError, TypeError) as error:
            raise UserError(
                f"{setting} answers {dialect.settings} as another project's server ({error}); correct "
                "rollout.servers.dialect"
            ) from error
        if missing is not None:
            raise UserError(f"{setting} is a server that Braid cannot train with: start it with {missing}")
        await self._prepare_columns()

    async def _prepare_columns(self) -> None:
        """Make the server's workers compute the run's columns per token. Raises UserError if they cannot."""
        names, dialect = self.spec.needs.columns, self.spec.dialect
        if names and dialect.prepare is not None:
            answer = await self.ask("POST", *dialect.prepare(names))
            for failure in filter(None, answer.get("results") or ()):
                raise UserError(f"rollout.servers: {self.url} cannot return {', '.join(names)}: {failure}")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def submit(self, request: Request) -> Response:
        await self._awake.wait()
        if request.uid in self._rows:
            raise ValueError(f"row {request.uid} is under way already")
        if self._failure is not None:
            raise self._failure
        row, spec = row_of(request, self.spec.tokenizer, self.spec.end_ids, self.max_sequence_tokens), self.spec
        row.name, row.version, readers = uuid4().hex, self.version, self._readers(request)
        call_arguments = self._call_for(row)
        call = asyncio.ensure_future(self.ask("POST", *call_arguments, most=ANSWER_BYTES + row.limit * TOKEN_BYTES))
        self._rows[request.uid], is_read = (row, call), not request.columns
        try:
            with WORK.waiting():
                answer = await call
                answers = await self._answers(row, answer, readers)
                await self.check_weights()
            is_read = True
        except ServerFailure as error:
            self._count_unfinished(request.uid, str(error))
        except MissingCall as error:
            if not request.images:
                raise
            raise UserError(
                f"rollout.servers: {self.url} takes no images: start it with {spec.dialect.seeing_start}"
            ) from error
        finally:
            call.cancel()
            del self._rows[request.uid]
            self._unread += [] if is_read else [row.name]
            aborted = request.uid in self._aborted
            self._aborted.discard(request.uid)
        tokens, values = self._read(row, answers, readers)
        ended = any(row.record_token(token) for token in tokens)
        if ended:
            self._unfinished.pop(request.uid, None)
        elif not aborted:
            early = f"{self.url} ended row {request.uid} after {len(row.tokens)} tokens, before its end"
            self._count_unfinished(request.uid, early)
        sizes, drawn = (len(request.prompt), len(row.tokens)), dict[str, Tensor]()
        for name, entries in values.items():
            column = token_columns[name]
            entries = entries if isinstance(entries, Tensor) else torch.tensor(entries, dtype=column.dtype)
            drawn[name] = entries[: column.entries(*sizes)]
        return row.finished(not ended, (torch.tensor(row.tokens, dtype=torch.int64), drawn))

    def _readers(self, request: Request) -> dict[str, ColumnReader]:
        """Return how the server returns the columns of a row. Raises UserError for one that it does not return."""
        columns = [column for column in returned_columns(request.columns) if column.name != VERSIONS]
        readers = {column.name: self.spec.dialect.column(column) for column in columns}
        if lacking := [name for name, reader in readers.items() if reader is None]:
            raise UserError(f"rollout.servers: {self.url} returns no column {lacking[0]}; use another engine")
        return {name: reader for name, reader in readers.items() if reader is not None}

    async def _answers(
        self, row: EngineRow, answer: Json, readers: Mapping[str, ColumnReader]
    ) -> dict[ColumnCall | None, Json]:
        """Return a row's answer, under None, and those of the calls that its columns need."""
        answers: dict[ColumnCall | None, Json] = {None: answer}
        for call in {reader.call for reader in readers.values() if reader.call is not None}:
            unread, self._unread = self._unread, []
            most = ANSWER_BYTES + (len(row.request.prompt) + row.limit) * TOKEN_BYTES
            answers[call] = await self.ask("POST", *call(row.name, unread), most=most)
        return answers

    def _read(
        self, row: EngineRow, answers: Mapping[ColumnCall | None, Json], readers: Mapping[str, ColumnReader]
    ) -> tuple[Sequence[int], dict[str, Any]]:
        """Return the tokens of a row and the values of its columns. Raises UserError for an unexpected answer."""
        answer = answers[None]
        try:
            tokens = self.spec.dialect.read(answer)
            values = {name: reader.read(answers[reader.call], row.name) for name, reader in readers.items()}
        except UserError as error:
            raise UserError(f"rollout.servers: {self.url} {error}") from error
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise UserError(f"rollout.servers: {self.url} gives an answer without tokens: {shown(answer)}") from error
        values = {name: entries for name, entries in values.items() if entries is not None}
        if fault := self.fault_in(tokens, values) or self.fault_in_prompt(row.request, answer):
            raise UserError(f"rollout.servers: {self.url} {fault}")
        return tokens, values

    def _count_unfinished(self, uid: Uid, reason: str) -> NoReturn:
        """Raise EngineError with why a row did not end, to request it again; UserError after the last attempt."""
        self._unfinished[uid] += 1
        if self._unfinished[uid] == MOST_UNFINISHED:
            raise UserError(f"rollout.servers: {reason}, {MOST_UNFINISHED} times; name another server")
        raise EngineError(reason)

    def _call_for(self, row: EngineRow) -> ServerCall:
        """Return the call that asks for a row. Raises UserError for images that the server cannot be asked with."""
        spec, request = self.spec, row.request
        if not request.images:
            return spec.dialect.generate(row, spec.seed, self.weights, spec.needs.reproducible)
        if spec.vision is None or spec.dialect.generate_seeing is None:
            raise UserError(
                f"row {request.uid} has images, and {self.url} cannot be asked with images; write "
                "rollout.engine=embedded, or take a server of vLLM and a model that sees"
            )
        ids = spec.vision.collapse(request.prompt.tolist(), request.images)
        prompt = SeenPrompt(ids, [(span.name, self._data_uri(span.name)) for span in request.images])
        return spec.dialect.generate_seeing(row, spec.seed, self.weights, spec.needs.reproducible, prompt)

    def _written_image(self, name: str) -> str:
        """Return a `data:` URI of an image in the size in which the trainer's tower takes it."""
        assert self.spec.vision is not None
        written = io.BytesIO()
        self.spec.vision.resized(name).save(written, "PNG", compress_level=1)
        return f"data:image/png;base64,{base64.b64encode(written.getvalue()).decode()}"

    def fault_in_prompt(self, request: Request, answer: Mapping[str, Any]) -> str:
        """Return what is wrong with a prompt whose images the server has expanded; an empty text if nothing."""
        if not request.images or answer.get("prompt_token_ids") == request.prompt.tolist():
            return ""
        found = answer.get("prompt_token_ids")
        return (
            f"expands the images of row {request.uid} to other tokens than are trained "
            f"({len(found) if isinstance(found, list) else 'no'} tokens of the prompt, not {len(request.prompt)}); "
            "give it the image processor of the run's model, or write rollout.engine=embedded"
        )

    def fault_in(self, tokens: Any, values: Mapping[str, Any]) -> str:
        """Return the fault of an answer's tokens and values; an empty text if there is none."""
        vocabulary = self.spec.vocabulary
        if not all(isinstance(entries, list) for entries in (tokens, values.get(LOG_PROBS))):
            return "gives no lists of tokens and of their values"
        for token in tokens:
            if type(token) is not int or not 0 <= token < vocabulary:
                return f"gives a token {shown(token)}, and the model's are 0 to {vocabulary - 1}"
        for name, numbers in values.items():
            # A worker may have drawn more tokens than the server returns.
            if len(numbers) < len(tokens) or (len(numbers) > len(tokens) and name == LOG_PROBS):
                return f"gives {len(numbers)} {name} of the {len(tokens)} tokens that it drew"
        for number in values.get(LOG_PROBS, ()):
            if type(number) not in (int, float) or not -math.inf < number <= LOG_PROB_ROUNDING:
                return f"gives a log-prob {shown(number)}, which is no number from minus infinity to 0"
        return ""

    async def abort(self, uid: Uid) -> None:
        if uid not in self._rows:
            raise KeyError(f"row {uid} is not under way")
        row, call = self._rows[uid]
        self._aborted.add(uid)
        while not call.done():
            await self.ask("POST", *self.spec.dialect.abort(row.name))
            await asyncio.wait([call], timeout=ABORT_AGAIN_S)

    async def update_weights(self, version: int, source: WeightSource | None = None) -> None:
        check_idle(self.url, self._rows, "gets weights")
        with ExitStack() as stored:
            if source is not None and not isinstance(source, WeightFile | OfferedWeights):
                source = stored.enter_context(closing(self.spec.store(source.tensors())))
            if isinstance(source, WeightFile):
                check_shapes(source.shapes(), self.spec.shapes)
                if self.spec.hub_names is not None:
                    file = self.spec.store(self.spec.hub_names.of(source.tensors()))
                    source = stored.enter_context(closing(file))
            try:
                if source is not None:
                    await self.load_weights(source)
            except EngineError as error:
                # No row may be generated from weights of unknown version.
                self._failure = error
                raise
            self.version = version

    async def load_weights(self, weights: WeightFile | OfferedWeights) -> None:
        """Change the server's weights. Raises EngineError if that fails; the version of its weights is then unknown."""
        label = secrets.token_hex(8)
        earlier, self._held_weights = self._held_weights, None
        try:
            if isinstance(weights, OfferedWeights):
                path, field = self.spec.dialect.label
                # A server restarted in the meantime has other weights.
                same = earlier is not None and (await self.ask("GET", path)).get(field) == self.weights
                await self._receive(weights, label, earlier if same else None)
            elif (spec := self.spec).needs.receives:
                host = urlsplit(self.url).hostname
                assert host is not None
                with closing(WeightOffer(Ranks(), address_towards(host), spec.limit_s, spec.device)) as offer:
                    await self._receive(offer.keep(0, weights.parts()), label)
            else:
                for path, body in self.spec.dialect.load_weights(str(weights.folder), label):
                    await self.ask("POST", path, body)
        except UserError as error:
            raise EngineError(f"the weights of {self.url} could not be changed: {error}") from error
        self.weights, self._is_labelled = label, True
        self._held_weights = weights if isinstance(weights, OfferedWeights) else None

    async def _receive(self, offered: OfferedWeights, label: str, earlier: OfferedWeights | None = None) -> None:
        """Make the server's workers receive the offered weights."""
        dialect = self.spec.dialect
        assert dialect.receive is not None, "checked before the run"
        path, field = dialect.workers
        workers = int((await self.ask("GET", path))[field])
        with offered.request(workers, earlier) as notice:
            for call in dialect.receive(asdict(notice), label):
                answer = await self.ask("POST", *call)
                for failure in filter(None, answer.get("results") or ()):
                    raise EngineError(f"the weights of {self.url} could not be changed: {failure}")

    async def check_weights(self) -> None:
        """Raise EngineError if the server was restarted after it received its weights: it may serve others."""
        if not self._is_labelled:
            return
        path, field = self.spec.dialect.label
        if (label := (await self.ask("GET", path)).get(field)) != self.weights:
            raise EngineError(f"{self.url} was restarted, or given weights by another program: it has {label!r}")

    async def sleep(self) -> None:
        """Refuse requests; the server keeps its memory, since it has separate devices."""
        check_idle(self.url, self._rows, "sleeps")
        self._awake.clear()

    async def wake(self) -> None:
        self._awake.set()

    async def recover(self) -> int:
        """Wait until the server is restarted by its owner, with its initial weights. Raises EngineError if it does not
        answer.
        """
        try:
            await self.ask("GET", self.spec.dialect.settings)
        except UserError as error:
            raise EngineError(str(error)) from error
        await self._prepare_columns()
        self._is_labelled, self._failure = False, None
        return NOTHING_YET

    def load(self) -> Load:
        running = min(len(self._rows), self.spec.slots)
        return Load(self.spec.slots, running, len(self._rows) - running)

    async def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, most: int = SETTINGS_BYTES
    ) -> dict[str, Any]:
        """Send a request, and read at most `most` bytes of the answer.

        Raises UserError if the server refuses it, answers more, or redirects it, and EngineError if the server fails or
        does not answer.
        """
        if self._session is None or self._session.closed:
            raise EngineError(f"{self.url} has not been reached")
        try:
            # Redirects are refused: prompts and the names of weights would go to an address that the user has not
            # configured.
            async with self._session.request(method, self.url + path, json=body, allow_redirects=False) as response:
                status, target = response.status, response.headers.get("Location", "")
                content = bytearray()
                async for piece in response.content.iter_chunked(PIECE_BYTES):
                    content += piece
                    if len(content) > most:
                        raise UserError(f"{self.url}{path} answers with more than the {most} bytes that were asked for")
        except TimeoutError:
            raise EngineError(f"{self.url}{path} did not answer for {self.spec.limit_s:g} s") from None
        except ClientError as error:
            raise EngineError(f"{self.url} does not answer: {error}") from error
        if 300 <= status < 400:
            raise UserError(f"{self.url}{path} redirects to {shown(target)}; name that address in rollout.servers")
        kind: type[Exception] = UserError if 400 <= status < 500 else EngineError
        if status in (HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND):
            kind = MissingCall
        if status >= 500 and status not in STARTING:
            kind = ServerFailure
        fault = str(status)
        if status < 400:
            try:
                # A server may write infinite log-probs, which are refused with their token.
                answer = (
                    parse_json(bytes(content), most, finite=False, refuse_surrogates=False) if content.strip() else None
                )
            except ValueError:
                answer = ""
            if isinstance(answer, dict | None):
                return answer or {}
            fault = "no JSON object"
        text = printable(" ".join(content.decode(errors="replace").split())[:300])
        raise kind(f"{self.url}{path} answers {fault}: {text}")
