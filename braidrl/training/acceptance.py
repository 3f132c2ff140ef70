"""Further checks of `braid check` besides the proof of a plan: pipeline stages, adapters, half precision, files,
resuming.

Each measure takes a twin and its plan, and returns a value and its bound, without weights, a device or another process.
Layouts are proven by real ranks: two must compute the log-probs and gradient norm of one process (`layout_findings`).
"""

import copy
import tempfile
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from braidrl.algorithms.ragged import Ragged, join_response
from braidrl.algorithms.registry import responses
from braidrl.cluster.ranks import run_ranks
from braidrl.cluster.world import World
from braidrl.config import LoraConfig, parse_config
from braidrl.config.layout import ParallelLayout
from braidrl.data.rows import Rows
from braidrl.errors import UserError
from braidrl.observe.metrics import Sums
from braidrl.training.backends import BackendSpec
from braidrl.training.compute.attention import PackedSequences
from braidrl.training.decoders import proof
from braidrl.training.decoders.body import ForwardPlan, body_of, decoder_of, run_body, set_training, use_plan
from braidrl.training.decoders.routing import experts_in
from braidrl.training.loading import read_buffers, skeleton
from braidrl.training.lora import add_adapters, merged, plain_names, stacks_of
from braidrl.training.memory.footprint import divide_tokens
from braidrl.training.objective import Objective
from braidrl.training.parallel.layouts import DataParallel
from braidrl.training.parallel.pipeline import is_tied, split_layers
from braidrl.training.pretrained import read_model_config
from braidrl.training.roles.worker import RoleWorker
from braidrl.weights.checkpoint_files import ParameterReader
from braidrl.weights.model_files import ModelFiles, auto_class

EXACT = 1e-5
"""The same bits at another address may be multiplied in another order."""
NOISE = 1e-4
"""Gradients below are rounding, of which Adam would make whole steps in either direction."""
ROUNDING = 3.0
"""In bfloat16, packed rows may differ from float32 by this many times the difference of transformers' own rows."""
Measure = Callable[[proof.Twin, ForwardPlan], tuple[float, float]]
"""Returns a value and its bound."""


def pipeline_stages(twin: proof.Twin, plan: ForwardPlan) -> tuple[float, float]:
    """Run the pipeline ranks' parts one after the other: two ranks, or one per layer if two do not divide the layers.

    Hidden states and gradients must equal those of the full model. A parameter that two ranks hold would be trained on
    one and stale on the other.
    """
    if plan.by_rows:
        raise ValueError("its attention is its own")
    reference = twin.model(plan)
    layers = len(body_of(reference).layers)
    ranks = 2 if layers % 2 == 0 else layers
    sequences = PackedSequences.of([len(row) for row in twin.rows], twin.device)
    ids, positions = torch.cat(twin.rows)[None], sequences.position_ids()
    hidden, parameters_of_ranks = None, dict[str, nn.Parameter]()
    for rank in range(ranks):
        model = twin.model(plan)
        split_layers(model, rank, ranks)
        hidden = run_body(model, None if rank else ids, positions, sequences, hidden)
        parameters = dict(model.named_parameters())
        if rank and is_tied(model):  # ranks sum the gradients of tied embeddings
            parameters = {name: p for name, p in parameters.items() if p is not model.get_input_embeddings().weight}
        if twice := sorted(parameters_of_ranks.keys() & parameters.keys()):
            raise ValueError(f"two ranks hold {twice[0]}")
        parameters_of_ranks |= parameters
    expected = run_body(reference, ids, positions, sequences)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0)).to(expected)
    assert hidden is not None
    for states in (hidden, expected):
        (states * weights).sum().backward()
    expected_gradients = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    scale = max(float(g.abs().max()) for g in expected_gradients.values())
    grads = {n: p.grad for n, p in parameters_of_ranks.items() if p.grad is not None}
    if missing := sorted(expected_gradients.keys() - grads.keys()):
        raise ValueError(f"no rank has the gradient of {missing[0]}")
    names = sorted(expected_gradients)
    return max(
        proof.distance([hidden.detach()], [expected.detach()]),
        proof.distance([grads[n] for n in names], [expected_gradients[n] for n in names]) / scale,
    ), proof.BOUND


@torch.no_grad()
def tensor_ranks(twin: proof.Twin, plan: ForwardPlan) -> tuple[float, float]:
    """Check that the layers accept a token shard between their blocks, as under tensor parallelism.

    `layout_findings` starts real ranks.
    """
    if plan.by_rows:
        raise ValueError("its attention is its own")
    model = twin.model(plan)
    if not model.config.get_text_config().base_model_tp_plan:
        raise ValueError("transformers has no tensor-parallel plan of it")
    divide_tokens(model, 2)
    sequences = PackedSequences.of([len(row) for row in twin.rows[:2]], twin.device)
    try:
        run_body(model, torch.cat(twin.rows[:2])[None], sequences.position_ids(), sequences)
    except RuntimeError as error:
        raise ValueError(f"{type(decoder_of(model)).__name__} computes with all tokens between its blocks") from error
    return 0.0, proof.BOUND


def adapters(twin: proof.Twin, plan: ForwardPlan) -> tuple[float, float]:
    """Compare a model with adapters on its linear layers and experts to one with merged weights; every adapter must
    get a gradient.
    """
    model = twin.model(plan)
    linear = {n.rpartition(".")[2] for n, m in body_of(model).layers.named_modules() if isinstance(m, nn.Linear)}
    stacks = list(stacks_of(body_of(model).layers))
    if not linear and not stacks:
        raise ValueError("its layers have no linear modules")
    usual = [name for name in LoraConfig().targets if name in linear]
    add_adapters(model, LoraConfig(rank=4, targets=[*(usual or sorted(linear)), *stacks]))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    adapted = proof.packed_log_probs(model, twin.rows)
    torch.cat(adapted).sum().backward()
    without = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    plain = twin.model(plan)
    plain.load_state_dict(
        {n: merged(t) for n, t in plain_names(model, model.state_dict(keep_vars=True)).items()}, strict=False
    )
    with torch.no_grad():
        value = proof.distance([log_probs.detach() for log_probs in adapted], proof.packed_log_probs(plain, twin.rows))
    if without:
        raise ValueError(f"adapters without a gradient: {without[0]}")
    return value, proof.BOUND


@torch.no_grad()
def half_precision(twin: proof.Twin, plan: ForwardPlan) -> tuple[float, float]:
    """Compare packed rows and transformers' rows in bfloat16 with float32, by the median: rounding may choose other
    experts for a few.
    """
    ours = proof.packed_log_probs(twin.model(plan).to(torch.bfloat16), twin.rows)
    model = copy.deepcopy(twin.reference).to(torch.bfloat16)
    expected = []
    for row in twin.rows:
        logits = model(input_ids=row[None], use_cache=False).logits[0, :-1].float()
        expected.append(logits.log_softmax(-1).gather(-1, row[1:, None])[:, 0])
    exact = twin.alone[0]
    packed, unpacked = (
        float((torch.cat(log_probs) - torch.cat(exact)).abs().median()) for log_probs in (ours, expected)
    )
    return packed, ROUNDING * unpacked + 1e-3


@torch.no_grad()
def save(model: Any, folder: str, **options: Any) -> None:
    """Save a model as transformers does, on any rank; transformers writes only on the first one."""
    model.should_save_on_this_rank = lambda _: True
    model.save_pretrained(folder, **options)


def exported(twin: proof.Twin, plan: ForwardPlan) -> tuple[float, float]:
    """Save the model as in a checkpoint, load it with transformers and compare logits."""
    with tempfile.TemporaryDirectory() as folder:
        model = twin.model(plan)
        save(model, folder, state_dict=dict(model.state_dict()))
        loaded: Any = auto_class(twin.config).from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
        loaded.to(twin.device).eval()
    row = twin.rows[1][None]
    logits = [m(input_ids=row, use_cache=False).logits for m in (loaded, twin.reference)]
    return proof.distance(logits[:1], logits[1:]), proof.BOUND


def read_in_parts(twin: proof.Twin, plan: ForwardPlan) -> tuple[float, float]:
    """Check that a model of which each rank reads a part is the one that is read in full."""
    if plan.by_rows:
        return 0.0, EXACT  # only `expert` shards such a model
    return parts_differ(twin, plan), EXACT


def experts_in_parts(twin: proof.Twin, plan: ForwardPlan) -> tuple[float, float]:
    """As `read_in_parts`, of a mixture that runs by rows."""
    if not plan.by_rows or not experts_in(twin.config):
        return 0.0, EXACT
    return parts_differ(twin, plan), EXACT


@torch.no_grad()
def parts_differ(twin: proof.Twin, plan: ForwardPlan) -> float:
    """Read each parameter from files into a model on the meta device, as sharding ranks do, and rebuild its buffers;
    return how far its log-probs are from those of the model.
    """
    model = twin.model(plan)
    with tempfile.TemporaryDirectory() as folder:
        save(model, folder)
        parts, is_whole = skeleton(
            auto_class(twin.config), Path(folder), copy.deepcopy(twin.config), plan, torch.float32
        )
        if not is_whole:
            return 0.0  # such a model is always loaded in full
        files = ModelFiles(Path(folder), parts)
        read_buffers(parts, files)
        ParameterReader(Path(folder), parts, files=files)(parts)
    use_plan(parts.to(twin.device).eval(), plan)
    return proof.distance(proof.packed_log_probs(parts, twin.rows), proof.packed_log_probs(model, twin.rows))


def resumed(twin: proof.Twin, plan: ForwardPlan) -> tuple[float, float]:
    """Compare two steps with one step, save, load and another step; the weights must be equal."""

    def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
        set_training(model, True)
        optimizer.zero_grad()
        torch.cat(proof.packed_log_probs(model, twin.rows)).sum().backward()
        optimizer.step()

    through, first = twin.model(plan), twin.model(plan)
    twice, once = (torch.optim.AdamW(model.parameters(), lr=1e-3, eps=NOISE) for model in (through, first))
    step(through, twice)
    step(through, twice)
    step(first, once)
    with tempfile.TemporaryDirectory() as folder:
        save(first, folder)
        second: Any = auto_class(twin.config).from_pretrained(
            folder, attn_implementation=plan.attention, dtype=torch.float32
        )
    check_loaded(first, second)
    use_plan(second.to(twin.device), plan)
    again = torch.optim.AdamW(second.parameters(), lr=1e-3, eps=NOISE)
    again.load_state_dict(once.state_dict())
    step(second, again)
    return proof.distance([p.detach() for p in second.parameters()], [p.detach() for p in through.parameters()]), EXACT


def check_loaded(saved: Any, loaded: Any) -> None:
    """Raise ValueError, naming the tensor, if transformers loads other weights than it has saved."""
    weights = dict(loaded.named_parameters())
    for name, parameter in saved.named_parameters():
        differs = (weights[name].detach().to(parameter.device) != parameter.detach()).flatten(
            1 if parameter.dim() > 1 else 0
        )
        if bool(differs.any()):
            padding = saved.config.get_text_config().pad_token_id
            rows = differs.any(-1).nonzero().flatten().tolist() if parameter.dim() > 1 else []
            remedy = "; write pad_token_id: null in config.json" if rows == [padding] else ""
            raise ValueError(f"transformers loads other values of {name} than the files have{remedy}")


MEASURES: dict[str, Measure] = {
    "pipeline ranks equal one": pipeline_stages,
    "tensor ranks divide its tokens": tensor_ranks,
    "experts of rows of equal length are read in parts": experts_in_parts,
    "adapters equal merged weights": adapters,
    "bfloat16 is within rounding": half_precision,
    "an export has the same logits in transformers": exported,
    "read in parts by file names, buffers rebuilt": read_in_parts,
    "a resumed run has the same weights": resumed,
}
AXES = {
    "pipeline": "pipeline ranks equal one",
    "tensor": "tensor ranks divide its tokens",
    "expert": "experts of rows of equal length are read in parts",
}
"""The property that an axis of a layout needs."""
HALF, ADAPTERS = "bfloat16 is within rounding", "adapters equal merged weights"
FILES = ("an export has the same logits in transformers", "a resumed run has the same weights")
"""The properties that every training run needs, besides those of its plan."""
OPTIONAL = {*AXES.values(), HALF, ADAPTERS}
"""Properties that a model may lack; the setting that needs one is then refused."""


def accept(name: str, twin: proof.Twin, plan: ForwardPlan) -> proof.Finding:
    return proof.Finding.of(name, MEASURES[name], twin, plan)


def all_findings(twin: proof.Twin) -> tuple[ForwardPlan, list[proof.Finding]]:
    """Return the plan of a twin, and its findings: first the proof's, which end with the one on decoding, then one for
    each of MEASURES.
    """
    plan, findings = proof.best_plan(twin)
    return plan, [*findings, *(accept(name, twin, plan) for name in MEASURES)]


def check_accepted(config: Any, plan: ForwardPlan, folder: Path, name: str, remedy: str) -> None:
    """Raise UserError, with the remedy, if a property of a model does not hold; each configuration is measured once on
    a machine.
    """

    def measured() -> dict[str, Any]:
        return asdict(accept(name, proof.Twin(config, device=proof.proof_device()), plan))

    with proof.quietly(), torch.enable_grad():
        finding = proof.Finding(**proof.remembered(config, name.replace(" ", "-"), measured))
    if not finding.holds:
        why = finding.note or f"it differs by {finding.value:.1g}"
        raise UserError(f"{remedy}: for the model in {folder} it is not proven that {name}: {why}")


RANKS = 2
LAYOUTS: dict[str, dict[str, Any]] = {
    "data 2": {"data": 2},
    "shard full": {"shard": "full"},
    "sequence 2": {"sequence": 2},
    "context 2": {"context": 2},
    "tensor 2": {"tensor": 2},
    "pipeline 2": {"pipeline": 2},
    "expert 2": {"expert": 2},
}
"""The layouts of two ranks by name; `expert` is for mixtures."""
BY_ROWS = [LAYOUTS["data 2"], LAYOUTS["expert 2"]]
"""Those in which a model runs by rows."""
LIMIT_S = 60.0


def layout_findings(twin: proof.Twin, plan: ForwardPlan, names: Collection[str] = ()) -> list[proof.Finding]:
    """Run two ranks on this machine for each layout, or those of these names, and compare them with one process."""
    is_mixture = bool(experts_in(twin.config))
    tried = {name: LAYOUTS[name] for name in names or LAYOUTS if is_mixture or "expert" not in LAYOUTS[name]}

    def difference(layout: dict[str, Any]) -> tuple[float, float]:
        if plan.by_rows and layout not in BY_ROWS:
            raise ValueError("its attention is its own")
        for axis in AXES.keys() & layout.keys():
            if not (finding := accept(AXES[axis], twin, plan)).holds:
                raise ValueError(f"{axis} is refused: {finding.name}: {finding.note or finding.value}")
        both = run_ranks(f"{__name__}:figures", {**task, "layout": layout}, RANKS, LIMIT_S)
        pairs = [(both["log_probs"][n], row) for n, row in alone["log_probs"].items()]
        gaps = [abs(a - b) for sharded, row in pairs for a, b in zip(sharded, row, strict=True)]
        return max(*gaps, abs(both["norm"] - alone["norm"]) / alone["norm"]), proof.BOUND

    with tempfile.TemporaryDirectory() as folder:
        save(twin.model(plan), folder)
        task = {"folder": folder, "layout": {}, "rows": [row.tolist() for row in twin.rows]}
        alone = figures(None, task)
        return [proof.Finding.of(f"{name} equals one process", difference, layout) for name, layout in tried.items()]


@proof.quietly()
def figures(world: World | None, task: dict[str, Any]) -> dict[str, Any]:
    """Return the log-probs of all rows by number and the global gradient norm; all but first tokens are actions."""
    rows, folder, layout = [torch.tensor(row) for row in task["rows"]], task["folder"], task["layout"]
    torch.set_num_threads(1)
    rank, size = (world.rank, world.size) if world else (0, 1)
    settings = {"flow": "sft", "model": folder, "device": "cpu", "dtype": "float32", "data": {"train": "none.jsonl"}}
    config = parse_config(
        {**settings, "trainer": {"layout": layout, "max_tokens_per_device": 64, "max_grad_norm": 1.0}}
    )
    ranks = DataParallel(supervisor=world) if world else DataParallel()
    worker = RoleWorker(BackendSpec("actor", config, True, ranks))
    numbers = [n for n in range(len(rows)) if n % size == rank and len(rows[n]) > 1]
    first, rest = (
        Ragged.from_rows([rows[n][part] for n in numbers], torch.int64) for part in (slice(1), slice(1, None))
    )
    columns: Any = zip(responses["join_response"].writes, join_response(first, rest), strict=True)
    zeros = torch.zeros(len(numbers), dtype=torch.int64)
    rank_rows = Rows({"source": zeros, "group": torch.tensor(numbers), "sample": zeros, **dict(columns)})
    log_probs = worker.forward("log_probs", rank_rows)
    worker.forward_backward(Objective.of("actor", {"loss": "sft", "aggregate": "token-mean"}), rank_rows, Sums())
    norm = worker.optim_step({"tokens": float(sum(len(row) - 1 for row in rows))}, 1)
    values = dict(zip(map(str, numbers), log_probs.tolist(), strict=True))
    parts = ranks.all_gather("figures", values)
    return {"norm": norm, "log_probs": {name: value for part in parts for name, value in part.items()}}


def check_plan(path: Path, layout: ParallelLayout, key: str) -> None:
    """Raise UserError for axes that cannot shard a model, and for a model whose checkpoints are not proven."""
    if not path.expanduser().is_dir():
        return
    config = read_model_config(path)
    plan = proof.proven_plan(config, path)
    for name in FILES:
        check_accepted(config, plan, path, name, "model")
    axes = [axis for axis in ("tensor", "sequence", "context", "pipeline", "expert") if getattr(layout, axis) > 1]
    axes += ["shard"] * (layout.shard != "none")
    if plan.by_rows and (others := [axis for axis in axes if axis != "expert"]):
        raise UserError(
            f"{key}: {others[0]} is not supported for the model in {path}, whose attention mixes tokens in its own "
            "way; write data alone"
        )
    for axis, name in AXES.items():
        if getattr(layout, axis) > 1:
            check_accepted(config, plan, path, name, f"{key}: write {axis}=1")
