"""All four runtimes in virtual time, on the scheduling functions that they use: how long a flow would take, and is each row done once."""

from braidrl.plan.simulation import Runtime, Simulation, Streaming, Workload
from tests.plan.synchronous import Distributed, Eager, Hybrid


def simulate(runtime: Runtime, work: Workload) -> Simulation:
    """Run a workload in virtual time. Raises Deadlock, TooStale or ValueError where a scheduling rule is broken."""
    runs = {"eager": Eager, "hybrid": Hybrid, "distributed": Distributed, "streaming": Streaming}
    return runs[runtime](work).simulate()
