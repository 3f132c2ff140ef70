"""Find the quickest placement, layouts and runtime for a flow on some devices, from cost functions alone.

devices, lengths ─▶ problem ─▶ work, rates (seconds of a stage) ─▶ layouts, choices ─▶ search, streaming, named ─▶ overlay, report
                                        ▲
                                   calibration ◀─ traces of runs
"""
