"""The planner: find the fastest placement, layouts and runtime for a flow on a set of devices, from cost functions
alone.

devices, lengths ─▶ problem ─▶ work, rates (seconds of a stage) ─▶ choices of a role ─▶ search, simulation
    ─▶ configured (overlay), report
                                        ▲
                                   calibration ◀─ traces of runs
"""
