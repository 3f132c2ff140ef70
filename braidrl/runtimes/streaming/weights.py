"""Weight publication under streaming: training ranks write or offer a version beside the next batch; the control plane
announces it.

trainer ranks ─file, collective─▶ control plane: role, version, location
    ─▶ an engine loads from there when the policy allows

A file in shared memory serves the engines of a machine; other machines, and devices, request slices from the ranks that
hold them.
"""

import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from braidrl.cluster.process import LOOPBACK
from braidrl.cluster.process_groups import background_group
from braidrl.cluster.shared_memory import PREFIX, machine, shared_folder
from braidrl.cluster.world import Ranks, World
from braidrl.engines.deployment import Deployment
from braidrl.engines.factory import file_writer
from braidrl.flow import Stage
from braidrl.runtimes.streaming.work import WeightLocation, Weights
from braidrl.weights.collective import OfferedWeights, WeightOffer
from braidrl.weights.file import WEIGHTS, FilePublisher, WeightFile, WeightWriter, remove_version
from braidrl.weights.shards import Parts, snapshot


def source_of(location: WeightLocation) -> WeightFile | OfferedWeights:
    """Return the weight source for an engine of this process."""
    if location.path and (not location.machines or machine() in location.machines):
        return WeightFile(location.path)
    assert location.offer is not None, "what this machine does not see is offered"
    return location.offer


def free(locations: Collection[WeightLocation]) -> None:
    """Remove the local files of versions that no engine loads; ranks on other machines remove their own files."""
    for location in locations:
        if location.path:
            remove_version(Path(location.path))


def remove_weights(run: str, folder: Path | None = None) -> None:
    """Remove a run's remaining version files on this machine."""
    for path in (folder or shared_folder()).glob(f"{PREFIX}{run}-weights*"):
        remove_version(path / WEIGHTS if path.is_dir() else path)


class VersionWriter:
    """One rank's share of publishing a role's weights; all ranks of the role publish together."""

    def __init__(
        self, role: str, parts: Parts, world: World, deployment: Deployment, run: str, ip: str = LOOPBACK
    ) -> None:
        """Plan the publication; publish nothing yet.

        `parts` returns this rank's shards of the model, `run` is the name of the run's files, and `ip` this machine's
        address for engines on others.
        """
        self.role, self.parts, self.world, self.run = role, parts, world, run
        # A separate group, because a thread uses it beside other collectives.
        ranks = Ranks(background_group()) if world.size > 1 else Ranks()
        config, transport = deployment.config, deployment.transport
        local_parts, limit_s = parts(), config.cluster.wait_limit_s
        self.publisher = (
            FilePublisher(file_writer(local_parts, ranks, config), parts, None) if transport is None else None
        )
        self.bytes = sum(part.tensor.shape.numel() * part.tensor.dtype.itemsize for part in local_parts.values())
        self.offer: WeightOffer | None = None
        if transport is not None:
            device = next(part.tensor.device for part in local_parts.values())
            self.offer = WeightOffer(ranks, ip, limit_s, device, transport)
        elif deployment.launcher == "ray" and world.first:
            # Its machine has the full file.
            self.offer = WeightOffer(Ranks(), ip, limit_s, torch.device("cpu"))

    def begin(self) -> Callable[[], WeightLocation]:
        """Return a function that publishes the current weights.

        A thread may call it while the weights are read, but not changed. Collective merging is done before this
        returns.
        """
        number = int(self.world.share("a version", secrets.randbelow(1 << 48)))
        parts = self.parts()
        if any(part.is_merged_together for part in parts.values()):
            parts = snapshot(parts)
        beside = side_stream(next((part.tensor.device for part in parts.values()), torch.device("cpu")))

        def publish() -> WeightLocation:
            location = WeightLocation(number, self.bytes)
            with beside:
                if self.publisher is None:
                    kept = snapshot(parts)
                    if torch.cuda.is_initialized():
                        torch.cuda.current_stream().synchronize()
                    assert self.offer is not None
                    location.offer = self.offer.keep(number, kept)
                    return location
                writer = self.publisher.writer
                file = self.publisher.write(number, parts, self._path(writer, number))
            location.path = str(file.path)
            location.machines = () if writer.in_folder else list(writer.machines)
            if self.offer is not None:
                location.offer = self.offer.keep(number, file.parts())
            return location

        return publish

    def _path(self, writer: WeightWriter, number: int) -> Path:
        name = f"{PREFIX}{self.run}-weights.{self.role}-{number}"
        return (writer.within or shared_folder()) / name / WEIGHTS if writer.in_folder else shared_folder() / name

    def forget(self, numbers: Collection[int]) -> None:
        """Free versions that no engine loads any more, and their files on this machine."""
        if self.publisher is not None:
            self.publisher.forget(numbers)
        if self.offer is not None:
            for number in numbers:
                self.offer.forget(number)


def side_stream(device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which a thread reads results of a device: on CUDA a side stream."""
    if device.type != "cuda":
        return nullcontext()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)


class Versions:
    """The versions of some roles that may still be loaded; version 0, the model's own, has no location."""

    def __init__(self, roles: Collection[str]) -> None:
        self.by_role: dict[str, dict[int, WeightLocation]] = {role: {} for role in roles}
        self.replaced: list[WeightLocation] = []
        """Weights that engines may still read until each has loaded newer ones."""

    def add(self, role: str, version: int, location: WeightLocation) -> None:
        """Record a published version; regrouped ranks publish again what lost ranks held."""
        if (earlier := self.by_role[role].get(version)) is not None:
            self.replaced.append(earlier)
        self.by_role[role][version] = location

    def replace_all(self) -> None:
        """Forget all versions, which engines may still read."""
        self.replaced += self.locations()
        self.by_role = {role: {} for role in self.by_role}

    def take_replaced(self) -> list[WeightLocation]:
        """Return the replaced weights once, when no engine reads them any more."""
        replaced, self.replaced = self.replaced, []
        return replaced

    def newest_complete(self, loaded: int, published: int, updates_of: Callable[[str, int], Sequence[Stage]]) -> int:
        """Return the newest version from `loaded` to `published` up to which the weights of all roles that were updated
        have arrived; ranks write the newest ones beside their next step.
        """
        newest = loaded
        for version in range(max(loaded, 0) + 1, published + 1):
            if any(version not in known and updates_of(role, version) for role, known in self.by_role.items()):
                break
            newest = version
        return newest

    @property
    def outlive_trainers(self) -> bool:
        """Return True if every version is in a file that survives the ranks that wrote it."""
        return all(location.path for location in self.locations())

    def between(self, current: int, newest: int) -> list[Weights]:
        """Return the updates from one version to another: for each changed role its newest version up to `newest`."""
        chosen: list[Weights] = []
        for role, locations in self.by_role.items():
            version = newest_of(locations, newest)
            if version > current:
                chosen.append((role, version, locations[version]))
        return chosen

    def outdated(self, used_versions: Collection[int]) -> list[WeightLocation]:
        """Forget old versions that none of `used_versions` needs; return their locations."""
        freed: list[WeightLocation] = []
        for locations in self.by_role.values():
            needed = {newest_of(locations, version) for version in used_versions}
            for version in [version for version in locations if version < max(needed) and version not in needed]:
                freed.append(locations.pop(version))
        return freed

    def withdrawn(self, version: int) -> list[WeightLocation]:
        """Forget versions newer than this one, which no engine has loaded; return their locations."""
        newer = [(locations, number) for locations in self.by_role.values() for number in locations if number > version]
        return [locations.pop(number) for locations, number in newer]

    def locations(self) -> Iterator[WeightLocation]:
        """Return the locations of all kept versions."""
        return (location for versions in self.by_role.values() for location in versions.values())


def newest_of(versions: Collection[int] | Mapping[int, WeightLocation], limit: int) -> int:
    """Return the newest version up to a limit; 0, the model's own, if there is none."""
    return max((version for version in versions if version <= limit), default=0)
