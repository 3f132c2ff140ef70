"""The permissions of untrusted code in each sandbox mode, as values. The table in docs/security.md is generated from them.

One implementation reads them: `mounts.py` makes bubblewrap's command, `sandbox.py` the processes of a call inside it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    """The permissions of code in one mode. Each field is a line of the security page's table: `QUESTIONS`."""

    processes: bool
    environment: bool
    memory: bool
    leftovers: bool
    writes: bool
    devices: bool
    sockets: bool
    reads: bool
    home: bool
    network: bool

    @property
    def walls(self) -> bool:
        """Return whether each call has processes of its own."""
        return not self.processes


OPEN = Policy(*[True] * 10)
POLICIES = {
    "process": Policy(*[False] * 7, *[True] * 3),
    "bubblewrap": Policy(*[False] * 10),
    "none": OPEN,
}
QUESTIONS = {
    "processes": "sees other processes, can signal or trace them",
    "environment": "has all variables of the run's environment; else PATH and the like, and those that are named",
    "memory": "has no limits of memory (private, shared, /tmp), processes, threads, files, output and processor time",
    "leftovers": "leaves processes, files in /tmp and /dev/shm, shared memory or keys behind a call or trajectory",
    "writes": "writes what the run trusts: kernels, packages, code, configuration, run folder, home",
    "devices": "changes settings of the kernel or opens disks, where it runs as root",
    "sockets": "reaches UNIX sockets below /run, /var and /tmp",
    "reads": "reads files beside Python, libraries and the folder of its own code",
    "home": "reads the home directory; else it has an empty one",
    "network": "reaches the network; an agent always reaches its endpoint",
}


def table() -> str:
    """Return the table of the security page."""
    lines = ["| code in the sandbox | " + " | ".join(f"`{mode}`" for mode in POLICIES) + " |", "|---|---|---|---|"]
    for field, question in QUESTIONS.items():
        cells = ("yes" if getattr(policy, field) else "no" for policy in POLICIES.values())
        lines.append(f"| {question} | {' | '.join(cells)} |")
    return "\n".join(lines)
