"""The planner: find the fastest placement, layouts and runtime for a flow on given devices, from cost functions alone.

devices, lengths ─▶ problem ─▶ work, rates (seconds of a stage) ─▶ layouts, choices ─▶ search, streaming, named ─▶ overlay, report
                                        ▲
                                   calibration ◀─ traces of runs
"""
