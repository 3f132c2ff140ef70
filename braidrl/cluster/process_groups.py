"""Process groups, and the single time limit of all waits in them.

open_store ──address──▶ connect_store         one process opens it, the others connect; they exchange messages there
join_group ──▶ the group of all ranks         its limit applies to all groups made from it
subgroup, mesh_of, background_group, group_between
"""

import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from psutil import net_if_addrs
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout, _world

from braidrl.cluster.peers import Peers
from braidrl.data.messages import pack_message, unpack_message
from braidrl.errors import LostPeers, UserError

CONNECT_S = 5.0
LAZY, LAZY_FROM, GROUPS_OF_A_RANK = "TORCH_GLOO_LAZY_INIT", 64, 8
"""Gloo's setting to connect ranks late, the ranks from which it is set, and the number of groups of all ranks."""
MOST_FILES = 1 << 20
DROP_EVERY_S, ALONE = 0.02, 2
"""Seconds between two looks at groups that are not used any more, and the references to one in a list alone."""


def open_store(host: str, limit_s: float) -> dist.TCPStore:
    """Open a store at this process's address, for others to connect to. This process keeps it alive; readers wait
    `limit_s` seconds.

    Raises UserError if the address is not reachable even from this process; torch would wait `limit_s` and ignore
    signals.
    """
    # A store that opens its port itself listens on every interface.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, 0), family=family, backlog=1024)
    try:
        socket.create_connection(listening.getsockname()[:2], CONNECT_S).close()
    except OSError as error:
        listening.close()
        raise UserError(
            f"processes of this run meet at {host}, which cannot be reached from here ({error.strerror or error}); "
            "bring the network interface of this address up, as in `ip link set lo up`"
        ) from error
    return dist.TCPStore(
        host,
        listening.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=limit_s),
        master_listen_fd=listening.detach(),
    )


def connect_store(host: str, port: int, limit_s: float, prefix: str = "") -> dist.Store:
    """Connect to another process's store, to keys with a prefix.

    Raises RuntimeError with its address after `limit_s` seconds.
    """
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=limit_s))
    return dist.PrefixStore(prefix, store) if prefix else store


# Notices: processes leave them in a store for others, which poll for them.


def put_message(store: dist.Store, key: str, value: Any = None) -> None:
    """Put a message at a key of a store; a message without a value marks an event."""
    store.set(key, pack_message(value))  # type: ignore[arg-type]  # takes bytes too


def has_message(store: dist.Store, *keys: str) -> bool:
    """Return True if a message is at each of the keys, without waiting."""
    return bool(store.check(list(keys)))


def message_at(store: dist.Store, key: str, type: Any = Any) -> Any:
    """Return the message of this type at a key; wait for it up to the store's time limit."""
    return unpack_message(store.get(key), type)


def put_first(store: dist.Store, key: str, text: str) -> str:
    """Put a text at a key unless it has one; return the text at the key."""
    written: bytes = store.compare_set(key, "", text)
    return written.decode()


def text_at(store: dist.Store, key: str) -> str:
    """Return the text at a key, written by `put_first`."""
    return store.get(key).decode()


def count_at(store: dist.Store, key: str, more: int = 0) -> int:
    """Add to the number at a key, initially 0, and return the sum."""
    return int(store.add(key, more))


def join_group(
    store: dist.Store, rank: int, size: int, limit_s: float, cuda: bool, host: str = ""
) -> dist.ProcessGroup:
    """Join the group of all ranks that use a store, with `cuda` for tensors on CUDA devices too, and return it.

    Each wait in the group has the limit of `limit_s` seconds. The group listens only on the interface towards `host`,
    the store's address. Raises LostPeers with the numbers of the ranks that did not arrive in time.
    """
    if host and (interface := interface_of(address_towards(host))):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    backend, limit = "cpu:gloo,cuda:nccl" if cuda else "gloo", timedelta(seconds=limit_s)
    # Ranks of a large group connect on first use: a rank has as many open files as it has connections.
    is_lazy = size > LAZY_FROM or size * GROUPS_OF_A_RANK > raised_open_files() // 2
    # Every group of this process connects in the same way.
    os.environ[LAZY] = str(int(is_lazy))
    put_message(store, f"came/{rank}")
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    except RuntimeError as error:
        late = [str(peer) for peer in range(size) if not has_message(store, f"came/{peer}")]
        raise LostPeers(f"waited {limit_s:g} s for ranks {', '.join(late) or 'that came'} to join: {error}") from error
    assert dist.group.WORLD is not None
    if is_lazy:
        # Gloo waits for a first connection up to five times as long as for data, so connections for messages are opened
        # while all ranks are present.
        Peers(dist.group.WORLD).all_gather(b"", 0)
    return dist.group.WORLD


def raised_open_files() -> int:
    """Raise this process's limit of open files to the allowed maximum; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    return MOST_FILES if soft == resource.RLIM_INFINITY else soft


def abort_groups() -> None:
    """End all collectives of this process, in every group; the groups become unusable."""
    for group in list(_world.pg_names):
        with suppress(RuntimeError):
            group.abort()


def destroy_groups() -> None:
    """Forget all groups after `abort_groups`, and DTensor's cached results, which refer to meshes of the groups.

    A later mesh of as many ranks is equal to such a mesh, and would get its groups and this process's coordinates in
    it.
    """
    # Imported here: most processes have no DTensors.
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    groups = list(_world.pg_names)
    threading.Thread(target=drop_unused, args=(groups,), name="end of groups", daemon=True).start()
    del groups
    dist.destroy_process_group()
    _clear_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()


def drop_unused(groups: list[dist.ProcessGroup]) -> None:
    """Drop each group when there are no other references to it.

    The last reference waits for the group's collectives, and `abort` does not always end one of gloo: a thread that is
    sending is not woken before the group's time limit.
    """
    while groups:
        time.sleep(DROP_EVERY_S)
        for position in reversed(range(len(groups))):
            if sys.getrefcount(groups[position]) <= ALONE:
                del groups[position]


def address_towards(peer: str) -> str:
    """Return this machine's address as seen from a host. Sends nothing."""
    family, *_, where = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as asking:
        asking.connect(where)
        address: str = asking.getsockname()[0]
    return address


def interface_of(address: str) -> str:
    """Return the name of the interface with an IPv4 address of this machine, or an empty string."""
    for name, every in net_if_addrs().items():
        if any(address_info.family == socket.AF_INET and address_info.address == address for address_info in every):
            return name
    return ""


def limit_of_all() -> timedelta:
    """Return the time limit of the group of all ranks."""
    group = dist.group.WORLD
    assert group is not None, "no group was joined"
    return group._get_backend(torch.device("cpu")).options._timeout


def subgroup(ranks: Tensor) -> dist.ProcessGroup | None:
    """Return the group of `ranks` (groups, members) that contains this rank, or None.

    All ranks must call this together.
    """
    group, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=limit_of_all())
    return group


def mesh_of(device: str, shape: Sequence[int], names: Sequence[str]) -> DeviceMesh:
    """Return a device mesh (`cpu` or `cuda`) over all ranks, with a process group per axis."""
    mesh = init_device_mesh(device, tuple(shape), mesh_dim_names=tuple(names))
    for group in mesh.get_all_groups():
        _set_pg_timeout(limit_of_all(), group)
    return mesh


def background_group() -> dist.ProcessGroup:
    """Return a second CPU group of all ranks, for a thread that runs concurrently with the main one."""
    group = dist.new_group(backend="gloo", timeout=limit_of_all())
    assert isinstance(group, dist.ProcessGroup)
    return group


def group_between(
    store: dist.Store, rank: int, size: int, limit_s: float, cuda: bool, address: str
) -> dist.ProcessGroup:
    """Return a group outside the group of all ranks, usable by torch.distributed functions; a process may be in
    several.

    The arguments are those of `join_group`, except that `address` is this machine's address, for gloo. With `cuda` NCCL
    is used between devices.
    """
    group, kinds = dist.ProcessGroup(dist.PrefixStore("between", store), rank, size), dist.ProcessGroup.BackendType
    limit = timedelta(seconds=limit_s)
    group._set_default_backend(kinds.NCCL if cuda else kinds.GLOO)
    gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._timeout = limit
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    group_store = dist.PrefixStore("group", dist.PrefixStore("cpu", store))
    group._register_backend(torch.device("cpu"), kinds.GLOO, dist.ProcessGroupGloo(group_store, rank, size, gloo))
    if cuda:
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = limit
        group_store = dist.PrefixStore("group", dist.PrefixStore("cuda", store))
        group._register_backend(torch.device("cuda"), kinds.NCCL, dist.ProcessGroupNCCL(group_store, rank, size, nccl))
    return group
