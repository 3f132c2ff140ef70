"""Tasks of ranks in layout tests: many cases on the same processes, each compared with a single process."""

from __future__ import annotations

import errno
import json
import shutil
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from braidrl.algorithms.ragged import Ragged
from braidrl.cluster.process_groups import subgroup
from braidrl.cluster.world import World
from braidrl.config import Config, LoraConfig, parse_config
from braidrl.config.layout import ParallelLayout
from braidrl.data.rows import Objects, Rows
from braidrl.data.token_columns import ROUTED_EXPERTS
from braidrl.data.vision import ImageSpan, Vision
from braidrl.engines.embedded.sharded_decoding import TensorRanks, load_for_decoding
from braidrl.observe.metrics import Sums
from braidrl.training.backend_contract import CHECKS, BackendUnderTest
from braidrl.training.backends import BackendSpec
from braidrl.training.memory.footprint import activation_bytes, model_shape
from braidrl.training.objective import Objective, denominators, with_group_tokens
from braidrl.training.parallel.layouts import DataParallel
from braidrl.training.roles.checkpoint import divided_state
from braidrl.training.roles.copies import RoleCopy, copy_within
from braidrl.training.roles.worker import RoleWorker
from braidrl.weights import file as weight_file
from braidrl.weights.file import SetWriter, WeightWriter
from braidrl.weights.model_files import ModelFiles
from braidrl.weights.shards import full_tensor, local_shard, weight_parts
from braidrl.weights.transfer import LIMIT_BYTES, WeightTransfer
from tests.tiny import TOKENIZER, settings
from tests.training.activations import kept_bytes
from tests.training.decoders.test_images import noise

OBJECTIVE: dict[str, Any] = {"loss": "clip", "aggregate": "token-mean", "entropy_coef": 0.01}
Found = dict[str, torch.Tensor]
Targets = tuple[str, ...]
EXPERT_ADAPTERS: Targets = ("q_proj", "experts.gate_up_proj", "experts.down_proj")
JETMOE_ADAPTERS: Targets = ("kv_proj", "input_linear.weight", "output_linear.weight")


def make_rows(prompt: int = 0) -> Rows:
    """Return twelve rows of very different lengths, from 2 to 60 tokens; with group prompts, this many tokens
    longer.
    """
    draw = torch.Generator().manual_seed(5)
    lengths = torch.tensor([2, 60, 3, 5, 9, 41, 2, 4, 17, 3, 28, 6])
    prompts = (lengths // 3).clamp(min=1)
    actions, count = lengths - prompts, len(lengths)
    if prompt:
        prompts = torch.full_like(lengths, prompt)
        lengths = prompts + actions
    mask = torch.cat([torch.arange(n) >= p for n, p in zip(lengths.tolist(), prompts.tolist(), strict=True)])
    tokens = torch.randint(0, len(TOKENIZER), (int(lengths.sum()),), generator=draw)
    if prompt:
        tokens[~mask] = torch.arange(count).repeat_interleave(prompts) // 2
    old = -2.5 + 0.3 * torch.randn(int(actions.sum()), generator=draw, dtype=torch.float64)
    rows = Rows(
        {
            "source": torch.zeros(count, dtype=torch.int64),
            "group": torch.arange(count) // 2,
            "sample": torch.arange(count) % 2,
            "length": lengths,
            "action_tokens": actions,
            "advantage": torch.randn(count, generator=draw, dtype=torch.float64),
            "tokens": Ragged.from_lengths(tokens, lengths),
            "action_mask": Ragged.from_lengths(mask, lengths),
            "sequence_lengths": Ragged.from_lengths(lengths, torch.ones_like(lengths)),
            "old_log_probs": Ragged.from_lengths(old, actions),
        }
    )
    return with_group_tokens(rows, rows)


def with_images(rows: Rows, vision: Vision) -> Rows:
    """Return rows whose first half of groups begin with images, one or two, alike within a group."""
    names = [vision.store.add(noise(*size, seed), Path(".")) for seed, size in enumerate([(84, 84), (56, 28)])]
    tokens, masks, images = list[torch.Tensor](), list[torch.Tensor](), list[list[ImageSpan]]()
    for number, group in enumerate(rows["group"].tolist()):
        seen = [names[:1], names[::-1], names[1:], [], [], []][group]
        ids, spans = vision.expand([vision.placeholder_token, 5] * len(seen), seen)
        tokens.append(torch.cat([torch.tensor(ids, dtype=torch.int64), rows["tokens"][number] % 20 + 7]))
        masks.append(torch.cat([torch.zeros(len(ids), dtype=torch.bool), rows["action_mask"][number]]))
        images.append(spans)
    joined = Ragged.from_rows(tokens, torch.int64)
    return rows.with_columns(
        {
            "length": joined.lengths,
            "tokens": joined,
            "action_mask": Ragged.from_rows(masks, torch.bool),
            "sequence_lengths": Ragged.from_lengths(joined.lengths, torch.ones_like(joined.lengths)),
            "images": Objects(tuple([list(span) for span in spans] for spans in images)),
        }
    )


def config_of(model: str, layout: dict[str, Any] | None = None, dtype: str = "float64", **more: Any) -> Config:
    # Recomputed activations go through the same collectives a second time.
    trainer = {
        "max_tokens_per_device": 64,
        "max_grad_norm": 0.5,
        "layout": layout or {},
        "activation_checkpointing": bool(layout),
        **more,
    }
    data = {"images": {"folder": f"{model}-images"}}
    return parse_config(settings(Path("."), Path(model), Path("none.jsonl"), dtype=dtype, trainer=trainer, data=data))


def own_rows(rows: Rows, world: World) -> torch.Tensor:
    """Return the positions of a rank's rows; the last of several ranks has none."""
    owner = torch.arange(len(rows)) % max(1, world.size - 1)
    return (owner == world.rank).nonzero().flatten()


def with_routes(rows: Rows, model: Any) -> Rows:
    """Return rows with experts of a mixture to replay, which its routers would not choose."""
    config, lengths = model.config, rows["length"] - 1
    draw = torch.Generator().manual_seed(6)
    scores = torch.rand(int(lengths.sum()), config.num_hidden_layers, config.num_experts, generator=draw)
    routes = scores.topk(config.num_experts_per_tok).indices.to(torch.uint8)
    return rows.with_columns({ROUTED_EXPERTS: Ragged.from_lengths(routes, lengths)})


def one_step(
    worker: RoleWorker,
    mine: torch.Tensor,
    iteration: int = 1,
    prompt: int = 0,
    replays: bool = False,
    sums: Sums | None = None,
) -> Found:
    """Return log-probs of own rows, then the results of one optimizer step on all rows: norm, Adam's gradients,
    weights, loads of experts.
    """
    rows, objective = make_rows(prompt), Objective.of("actor", OBJECTIVE)
    rows = rows if worker.vision is None else with_images(rows, worker.vision)
    if replays:
        rows, objective = with_routes(rows, worker.model), replace(objective, replays=True)
    own, sums = rows.take(mine), Sums() if sums is None else sums
    result = {"log_probs": worker.forward("log_probs", own).values}
    if replays:
        _, routes = worker.forward_with_routes(own.without([ROUTED_EXPERTS]))
        result["routes"] = routes.values.flatten().double()
    half = len(own) // 2
    for part in (own.take(list(range(half))), own.take(list(range(half, len(own))))):
        worker.forward_backward(objective, part, sums)
    norm = worker.optim_step({"tokens": denominators(rows)["tokens"]}, iteration)
    assert norm is not None and worker.optimizer is not None
    result["norm"] = torch.tensor(norm, dtype=torch.float64)
    result |= {name: torch.tensor(load) for name, load in worker.step_metrics.items()}
    result |= {f"state {name}": full_tensor(t) for name, t in divided_state(worker.optimizer).items()}
    return result | {f"weight {name}": tensor.clone() for name, tensor in worker.full_state_dict().items()}


@cache
def alone(
    model: str, dtype: str = "float64", steps: int = 1, prompt: int = 0, trainer: str = "{}", replays: bool = False
) -> Found:
    """Return the results of the last of several steps of one process on all rows, and its metrics' means; `trainer` has
    settings in JSON.
    """
    worker = RoleWorker(BackendSpec("actor", config_of(model, dtype=dtype, **json.loads(trainer)), train=True))
    for iteration in range(1, steps + 1):
        sums = Sums()
        values = one_step(worker, torch.arange(len(make_rows())), iteration, prompt, replays, sums)
    return values | {f"mean {name}": torch.tensor(mean) for name, mean in sums.means().items()}


def differences(
    found: Found, wanted: Found, mine: torch.Tensor, dtype: str = "float64", limit: float = 1e-7
) -> list[str]:
    """Return differences above `limit`; in float32 those of norm, log-probs and gradients above 1e-4: Adam's first step
    is a sign.
    """
    wanted = dict(wanted)
    wanted["log_probs"] = Ragged.from_lengths(wanted["log_probs"], make_rows()["action_tokens"]).take(mine).values
    if "routes" in wanted:
        routes = wanted["routes"].view(int((make_rows()["length"] - 1).sum()), -1)
        wanted["routes"] = Ragged.from_lengths(routes, make_rows()["length"] - 1).take(mine).values.flatten()
    limit, left_out = (limit, ()) if dtype == "float64" else (1e-4, ("weight",))
    # A pipeline stage has the gradients of its own layers; weights are compared as a whole.
    assert found.keys() <= wanted.keys()
    assert all(name.startswith(("state", "mean")) for name in wanted.keys() - found.keys())
    return [
        f"{name} by {float((tensor.double() - wanted[name].double()).abs().max()):.1e}"
        for name, tensor in found.items()
        if not name.startswith(left_out or "-")
        and not torch.allclose(tensor.double(), wanted[name].double(), rtol=limit, atol=limit)
    ]


def not_divided(worker: RoleWorker, ranks: int) -> list[str]:
    """Report a rank that holds more of the weights and of Adam's moments than its share, norms aside."""
    layout, parameters = worker.config.trainer.layout.resolve(ranks), list(worker.model.parameters())
    assert layout.data is not None and worker.optimizer is not None
    shards = layout.tensor * layout.shard_ranks
    # The first and the last stage have the vocabulary, which is large beside these layers.
    layers = sum(shape.numel() for name, shape in worker.shapes.items() if "layers" in name)
    vocabulary = worker.model.config.vocab_size * worker.model.config.hidden_size
    everything = sum(shape.numel() for shape in worker.shapes.values())
    share = layers / layout.pipeline + vocabulary if layout.pipeline > 1 else everything
    limit = 1.1 * share / shards
    held = sum(local_shard(p).numel() for p in parameters)
    moments = sum(t.numel() for name, t in worker.optimizer.state().items() if name.endswith("exp_avg"))
    return [f"holds {n} elements, its share is {limit:.0f}" for n in (held, moments) if n > limit]


def compare(world: World, task: dict[str, Any]) -> dict[str, list[str]]:
    """Return, by case, the differences of any rank from a single process."""
    torch.set_num_threads(1)
    result = {}
    for name, (model, layout, dtype) in task["cases"].items():
        world.at(name)
        mine = own_rows(make_rows(), world)
        worker = RoleWorker(
            BackendSpec("actor", config_of(model, layout, dtype), True, DataParallel(world.group, world))
        )
        differing = differences(one_step(worker, mine), alone(model, dtype), mine, dtype, task.get("limit", 1e-7))
        result[name] = of_all_ranks(world, differing + not_divided(worker, world.size))
    for name, case in task.get("stepped", {}).items():
        world.at(name)
        result[name] = of_all_ranks(world, three_steps(world, *case))
    for name, (model, layouts) in task.get("experts", {}).items():
        world.at(name)
        result[name] = of_all_ranks(world, divided_experts(world, model, layouts, Path(task["folder"], name)))
    for name, (model, layouts, targets) in task.get("adapted", {}).items():
        saved = list[Path]()
        for layout in layouts:
            world.at(f"{name} under {layout}")
            saved.append(Path(task["folder"], f"{name}-{len(saved)}"))
            differing = adapted_steps(world, model, layout, saved[-2:], tuple(targets), limit=1e-9)
            result[f"{name} under {layout}"] = of_all_ranks(world, differing)
    for model, layout, prompt in task.get("shared", []):
        result[f"one prompt under {layout}"] = of_all_ranks(world, with_shared_prompts(world, model, layout, prompt))
    for model, layout in task.get("kept", []):
        result[f"{model} keeps under {layout}"] = of_all_ranks(world, kept_otherwise(world, model, layout))
    for case in task.get("copied", []):
        result |= copied_weights(world, *case)
    for number, (model, layout, trainer) in enumerate(task.get("contract", [])):
        keep_contract(world, config_of(model, layout, **trainer), Path(task["folder"], f"contract-{number}"))
    for case in task.get("saved", []):
        result |= saved_and_loaded(world, *case)
    for case in task.get("parts", []):
        result |= written_in_parts(world, *case)
    for case in task.get("reshaped", []):
        result |= reshaped(world, *case)
    return result


def of_all_ranks(world: World, differing: list[str]) -> list[str]:
    parts = world.gather("differences", json.dumps(differing).encode())
    return [f"rank {rank}: {d}" for rank, part in enumerate(parts) for d in json.loads(bytes(part))]


def three_steps(
    world: World,
    model: str,
    layout: dict[str, Any],
    trainer: dict[str, Any],
    replays: bool = False,
    limit: float = 1e-9,
) -> list[str]:
    """Return the differences from a single process after three steps with settings of `trainer`."""
    mine, config = own_rows(make_rows(), world), config_of(model, layout, **trainer)
    worker = RoleWorker(BackendSpec("actor", config, True, DataParallel(world.group, world)))
    for iteration in range(1, 4):
        sums = Sums()
        values = one_step(worker, mine, iteration, replays=replays, sums=sums)
    parts = world.gather("metrics", json.dumps(sums.pairs()).encode())
    means = Sums().merge(*(Sums(json.loads(bytes(part))) for part in parts)).means()
    values |= {f"mean {name}": torch.tensor(mean) for name, mean in means.items()}
    return differences(values, alone(model, steps=3, trainer=json.dumps(trainer), replays=replays), mine, limit=limit)


def divided_experts(world: World, model: str, layouts: list[dict[str, Any]], folder: Path) -> list[str]:
    """Return what is wrong with experts of the first layout: their share, three steps, and a resume in the others."""
    mine, config, read = own_rows(make_rows(), world), config_of(model, layouts[0]), dict[str, int]()
    read_file, moved = ModelFiles._read, Moved()

    def noted(files: ModelFiles, name: str) -> torch.Tensor:
        tensor = read_file(files, name)
        read.update({name: tensor.nbytes} if ".experts." in name else {})
        return tensor

    with patch.object(ModelFiles, "_read", noted), moved:
        worker = RoleWorker(BackendSpec("actor", config, True, DataParallel(world.group, world)))
    layout, shapes = worker.ranks.layout, worker.shapes
    stored = sum(t.nbytes for name, t in load_file(Path(model, "model.safetensors")).items() if ".experts." in name)
    experts = {n: p for n, p in worker.model.named_parameters() if n.endswith(("gate_up_proj", "down_proj"))}
    share = sum(shapes[name].numel() for name in experts) // layout.expert
    share //= layout.shard_ranks * layout.tensor // layout.expert if layout.shard != "none" else 1
    held = sum(local_shard(p).numel() for p in experts.values())
    problems = [f"holds {held} elements of experts, its share is {share}"] * (not experts or held != share)
    if sum(read.values()) != stored // (layout.expert * layout.pipeline):
        problems.append(f"reads {sum(read.values())} bytes of experts, of {stored}")
    # The first tensor rank sends each other one its parts of matrices that are not of experts.
    others = sum(8 * shape.numel() for name, shape in shapes.items() if name not in experts)
    if moved.bytes >= min(read.values()) + (2 * others if layout.tensor > 1 else 0):
        problems.append(f"exchanges {moved.bytes} bytes with other ranks while it loads")
    values = one_step(worker, mine)
    problems += differences(values, alone(model), mine, limit=1e-9)
    worker.export(folder, world.first)
    for iteration in (2, 3):
        values = one_step(worker, mine, iteration)
    problems += differences(values, alone(model, steps=3), mine, limit=1e-9)
    world.gather("exported", b"")
    for other in layouts[1:]:
        resumed = RoleWorker(BackendSpec("actor", config_of(model, other), True, DataParallel(world.group, world)))
        resumed.load(folder)
        differing = differences(one_step(resumed, mine, 2), alone(model, steps=2), mine, limit=1e-9)
        problems += [f"resumed under {other}: {difference}" for difference in differing]
    return problems


def with_shared_prompts(world: World, model: str, layout: dict[str, Any], prompt: int) -> list[str]:
    """Return differences from a single process with shared prompts of this many tokens."""
    config, mine = config_of(model, layout), own_rows(make_rows(), world)
    trainer = config.trainer.model_copy(update={"share_prompts": True})
    worker = RoleWorker(
        BackendSpec("actor", config.model_copy(update={"trainer": trainer}), True, DataParallel(world.group, world))
    )
    assert worker.shares_prompts(make_rows(prompt))
    return differences(one_step(worker, mine, prompt=prompt), alone(model, prompt=prompt), mine)


def kept_otherwise(world: World, model: str, layout: dict[str, Any]) -> list[str]:
    """Report a forward pass that saves more or less for the backward pass than counted, where tensors between matrices
    are whole once.
    """
    tokens, result = 96, []
    shape, whole = model_shape(Path(model), torch.float64), ParallelLayout.model_validate(layout).resolve(world.size)
    one = tokens * shape.config.hidden_size * shape.element_bytes
    # The inputs of each layer and of the last norm, and two results of it, are sharded. Their products are whole.
    inputs = (shape.config.num_hidden_layers + 3 - 1) * one // whole.tensor + one
    counted = {False: activation_bytes(shape, tokens, False, whole), True: inputs}
    for checkpointing, expected in counted.items():
        config = config_of(model, layout)
        trainer = config.trainer.model_copy(update={"activation_checkpointing": checkpointing})
        worker = RoleWorker(
            BackendSpec("actor", config.model_copy(update={"trainer": trainer}), True, DataParallel(world.group, world))
        )
        worker.model.train()
        real = kept_bytes(worker.model, tokens)
        if not 0.9 < real / expected < 1.1:
            result.append(f"keeps {real} bytes where {expected} are counted, with {checkpointing=}")
    return result


def copied_weights(world: World, model: str, other: str, layouts: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Move a role's weights towards those of a role with another sharding; return deviations from the expected
    values.
    """
    first, second = (
        RoleWorker(BackendSpec("reference", config_of(path, layout), False, DataParallel(world.group, world)))
        for path, layout in zip((model, other), layouts, strict=True)
    )
    own, others = first.full_state_dict(), second.full_state_dict()
    expected = {name: tensor * 0.25 + others[name] * 0.75 for name, tensor in own.items()}
    RoleCopy(first, second).move(0.25)
    tensors = first.full_state_dict()
    return {
        f"copied {layouts}": [n for n, t in tensors.items() if not torch.allclose(t, expected[n], rtol=0, atol=1e-12)]
    }


class Moved(TorchDispatchMode):
    """Counts the bytes of the tensors that collectives send or receive."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.bytes += sum(t.nbytes for t in tree_leaves(args) if isinstance(t, torch.Tensor))
        return func(*args, **(kwargs or {}))


class Largest(TorchDispatchMode):
    """Return the bytes of the largest new tensor that any operation creates."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in known:
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return result


def reshaped(world: World, model: str, layouts: list[dict[str, Any]], lora: bool) -> dict[str, list[str]]:
    """Reshard after a step from the first layout to each other one and to files of all ranks; return what differs or is
    too large.
    """
    config = adapted_config(model, layouts[0]) if lora else config_of(model, layouts[0])
    worker = RoleWorker(BackendSpec("actor", config, True, DataParallel(world.group, world)))
    values, expected = {}, one_step(worker, own_rows(make_rows(), world))
    expected = {name.removeprefix("weight "): tensor for name, tensor in expected.items() if name.startswith("weight ")}
    limit = 8192  # Less than a matrix of a layer.
    for layout in layouts[1:]:
        other = RoleWorker(
            BackendSpec("actor", config_of(model, layout), False, DataParallel(world.group, world), is_copy=True)
        )
        copy = copy_within(worker, other.weights, other.ranks.is_sharded, limit)
        with Largest() as largest:
            copy.refresh()
        problems = [
            f"{name} differs"
            for name, tensor in other.full_state_dict().items()
            if not equal(tensor, expected[name], lora)
        ]
        problems += traffic_problems(copy.transfer, limit)
        if not lora and largest.bytes > limit:
            problems.append(f"a tensor of {largest.bytes} bytes was made")
        if layout == layouts[0] and copy.transfer.traffic.sent + copy.transfer.traffic.received:
            problems.append("what was there was sent")
        values[f"{model} {layouts[0]} to {layout}, lora {lora}"] = everywhere(world, problems)
    values[f"{model} {layouts[0]} to files, lora {lora}"] = everywhere(world, written(world, worker, expected, lora))
    values[f"{model} {layouts[0]} to slices, lora {lora}"] = everywhere(world, sliced(world, worker, expected, lora))
    return values


def written(world: World, worker: RoleWorker, wanted: Found, nearly: bool) -> list[str]:
    """Return errors of files that all ranks write together, in memory, in a folder, and without space."""
    ranks, parts = worker.ranks, worker.weights()
    writer, to_folder = WeightWriter(parts, ranks), WeightWriter(parts, ranks, repeat=True)
    for _ in range(2):
        with closing(writer.write(parts)) as file:
            read = dict(file.tensors())
    in_folder = to_folder.write(parts)
    again = dict(in_folder.tensors())
    problems = [n for n, t in wanted.items() if not (equal(read[n], t, nearly) and equal(again[n], t, nearly))]
    problems += traffic_problems(writer.transfer, LIMIT_BYTES)
    problems += [f"{name} is kept by a rank that does not write it" for name in worker.full_state_dict(gather=False)]
    if not read.keys() == again.keys() == in_folder.shapes().keys() == wanted.keys() or writer.transfer.traffic.sent:
        problems.append(
            f"the file has {sorted(read)}, and {writer.transfer.traffic.sent} bytes were sent for it on one machine"
        )
    problems += on_two_machines(world, worker, wanted, nearly)
    world.gather("read", b"")
    in_folder.close()
    world.gather("closed", b"")
    # The memory is full when one of the ranks writes: all say so.
    full = OSError(errno.ENOSPC, "No space left on device")
    last = world.rank == world.size - 1
    try:
        with patch.object(weight_file, "write_at", side_effect=full) if last else nullcontext():
            writer.write(parts)
    except OSError as error:
        problems += [str(error)] * (str(error.errno) not in str(error) or "braid-weights" not in str(error))
    else:
        problems.append("a file for which there was no room was written")
    return problems + ["the folder is still there"] * in_folder.folder.exists()


def on_two_machines(world: World, worker: RoleWorker, wanted: Found, nearly: bool) -> list[str]:
    """Return errors of the files of two machines with alternating ranks, which exchange missing blocks."""
    parts = worker.weights()
    with patch.object(weight_file, "machine", lambda: f"machine {world.rank % 2}"):
        writer = WeightWriter(parts, worker.ranks)
    with closing(writer.write(parts)) as file:
        read = dict(file.tensors())
        world.gather("read", b"")
    problems = [f"{name} differs on two machines" for name, t in wanted.items() if not equal(read[name], t, nearly)]
    return problems + traffic_problems(writer.transfer, LIMIT_BYTES)


def sliced(world: World, worker: RoleWorker, wanted: Found, nearly: bool) -> list[str]:
    """Return errors of the slices that pairs of ranks decode with; slices already held are not sent."""
    group = subgroup(torch.arange(world.size).view(-1, 2))
    assert group is not None
    model, slices = load_for_decoding(worker.path, worker.dtype, "cpu", TensorRanks(group))
    copy = copy_within(worker, lambda: weight_parts(model, slices), divided=True)
    copy.refresh()
    tensors = model.state_dict()
    problems = [n for n, whole in wanted.items() if not equal(tensors[n], slices.boxes[n].of(whole), nearly)]
    if worker.config.trainer.layout == ParallelLayout(tensor=2) and copy.transfer.traffic.sent:
        problems.append("what was there was sent")
    return problems + traffic_problems(copy.transfer, LIMIT_BYTES)


def equal(found: torch.Tensor, wanted: torch.Tensor, nearly: bool) -> bool:
    """Compare bit for bit; an adapter's sums may be added in another order where a part of it is merged separately."""
    return torch.allclose(found, wanted, rtol=0, atol=1e-12) if nearly else torch.equal(found, wanted)


def traffic_problems(transfer: WeightTransfer, limit: int) -> list[str]:
    """Report a rank that sent or received more than planned, or more at a time than the limit."""
    traffic = transfer.traffic
    planned = [
        sum(moves.total for moves in some)
        for some in zip(*((p.sends, p.receives) for p in transfer.plans), strict=True)
    ]
    result = [
        f"{done} bytes of {all_}"
        for done, all_ in zip((traffic.sent, traffic.received), planned, strict=True)
        if done != all_
    ]
    return result + [f"{traffic.peak} bytes at a time"] * (traffic.peak > limit)


def everywhere(world: World, problems: list[str]) -> list[str]:
    """Gather the problems of all ranks."""
    parts = world.gather("problems", json.dumps(problems).encode())
    return [f"rank {rank}: {p}" for rank, part in enumerate(parts) for p in json.loads(bytes(part))]


def keep_contract(world: World, config: Config, folder: Path) -> None:
    """Run every check of a training backend; a failure ends the ranks."""
    rows = make_rows()
    subject = BackendUnderTest(
        lambda: RoleWorker(BackendSpec("actor", config, True, DataParallel(world.group, world))),
        Objective.of("actor", OBJECTIVE),
        rows.take(own_rows(rows, world)),
        {"tokens": denominators(rows)["tokens"]},
        folder,
        lambda: world.gather("exported", b""),
        world.first,
    )
    for check in CHECKS:
        world.at(f"{check.__name__} under {config.trainer.layout}")
        check(subject)


def written_in_parts(world: World, model: str, layouts: list[dict[str, Any]], folder: str) -> dict[str, list[str]]:
    """Write a checkpoint of several files after a step in each layout, and resume it in the next one; count what ranks
    write and hold.
    """
    result, mine, limit, count = {}, own_rows(make_rows(), world), 8192, []

    def counted(handle: int, data: Any, at: int) -> None:
        count.append(len(data))
        write_at(handle, data, at)

    write_at = weight_file.write_at
    for number, layout in enumerate(layouts):
        worker = RoleWorker(BackendSpec("actor", config_of(model, layout), True, DataParallel(world.group, world)))
        one_step(worker, mine)
        saved, parts = Path(folder, f"saved-{number}"), worker.weights()
        with patch.object(weight_file, "FILE_BYTES", 30_000), patch.object(weight_file, "write_at", counted):
            count.clear()
            writer = SetWriter(parts, worker.ranks, "model", limit)
            if world.first:
                saved.mkdir(parents=True)
            world.gather("folder", b"")
            with Largest() as largest:
                written = writer.write(parts, saved)
            wrote = sum(world.gather("bytes", sum(count)))
            problems = traffic_problems(writer.transfer, limit)
            problems += [f"a tensor of {largest.bytes} bytes was made"] * (largest.bytes > limit)
            problems += ["a rank writes nothing"] * (world.rank not in writer.writers.values())
            sizes = sum(size for size, _ in written.values())
            problems += [f"{wrote} bytes were written for {sizes}"] * (wrote != sizes)
            problems += [name for name, said in written.items() if weight_file.digest(saved / name) != said]
            world.gather("read", b"")
            if world.first:
                shutil.rmtree(saved)
            world.gather("removed", b"")
            worker.export(saved, world.first)
        world.gather("exported", b"")
        following = layouts[(number + 1) % len(layouts)]
        other = RoleWorker(BackendSpec("actor", config_of(model, following), True, DataParallel(world.group, world)))
        other.load(saved)
        problems += differences(one_step(other, mine, 2), alone(model, steps=2), mine)
        result[f"{model} in parts under {layout}"] = everywhere(world, problems)
    return result


def saved_and_loaded(world: World, model: str, layouts: list[dict[str, Any]], folder: str) -> dict[str, list[str]]:
    """Save after a step in the first layout, resume in each layout, and export each in float32."""
    result, mine = {}, own_rows(make_rows(), world)
    first = RoleWorker(BackendSpec("actor", config_of(model, layouts[0]), True, DataParallel(world.group, world)))
    one_step(first, mine)
    first.export(Path(folder, "saved"), world.first)
    for number, layout in enumerate(layouts):
        world.gather("saved", b"")
        worker = RoleWorker(BackendSpec("actor", config_of(model, layout), True, DataParallel(world.group, world)))
        worker.load(Path(folder, "saved"))
        result[f"loaded under {layout} from {layouts[0]}"] = differences(
            one_step(worker, mine, 2), alone(model, steps=2), mine
        ) + not_divided(worker, world.size)
        single = RoleWorker(
            BackendSpec("actor", config_of(model, layout, "float32"), True, DataParallel(world.group, world))
        )
        single.export(Path(folder, f"export-{number}"), world.first)
    return result


def with_adapters(world: World, task: dict[str, Any]) -> dict[str, list[str]]:
    """Return differences of adapters from a single process in each layout, directly and after a resume."""
    torch.set_num_threads(1)
    result, folders = {}, [Path(task["folder"], "alone")]
    for number, layout in enumerate(task["layouts"]):
        world.at(str(layout))
        folders.append(Path(task["folder"], f"saved-{number}"))
        # The state saved by this layout, by the previous one, and by one process.
        result[str(layout)] = of_all_ranks(world, adapted_steps(world, task["model"], layout, folders[-2:]))
    return result


def adapted_steps(
    world: World, model: str, layout: dict[str, Any], folders: list[Path], targets: Targets = (), limit: float = 1e-7
) -> list[str]:
    """Return differences of a step of adapters from a single process, and after a resume from each folder that exists,
    the last of which is written here.
    """
    config, mine = adapted_config(model, layout, targets), own_rows(make_rows(), world)
    worker = RoleWorker(BackendSpec("actor", config, True, DataParallel(world.group, world)))
    differing = differences(one_step(worker, mine), alone_adapted(model, 1, targets), mine, limit=limit)
    worker.export(folders[-1], world.first)
    world.gather("saved", b"")
    for saved in folders:
        again = RoleWorker(BackendSpec("actor", config, True, DataParallel(world.group, world)))
        again.load(saved)
        differing += differences(one_step(again, mine, 2), alone_adapted(model, 2, targets), mine, limit=limit)
    return differing


def adapted_config(model: str, layout: dict[str, Any] | None = None, targets: Targets = ()) -> Config:
    config, own = config_of(model, layout), {"targets": targets} if targets else {}
    lora = LoraConfig(rank=4, alpha=6.0, **own)
    trainer = config.trainer.model_copy(update={"lora": lora, "learning_rate": 1e-2})
    return config.model_copy(update={"trainer": trainer})


@cache
def alone_adapted(model: str, steps: int, targets: Targets = ()) -> Found:
    worker = RoleWorker(BackendSpec("actor", adapted_config(model, targets=targets), train=True))
    for iteration in range(1, steps + 1):
        values = one_step(worker, torch.arange(len(make_rows())), iteration)
    return values
