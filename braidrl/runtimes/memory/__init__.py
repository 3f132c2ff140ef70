"""The device memory of a run, before and while it runs.

configuration, flow ──budget──▶ bytes of each role by part ──residency──▶ what is on the device in each stage, and the moves

`runtimes.sizing` chooses sizes by it. `training.memory` has what is below: the bytes of a model (`footprint`) and tensors that leave the
device (`offload`).
"""
