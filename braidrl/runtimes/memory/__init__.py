"""The device memory of a run: estimates before it, and residency of its models during it.

configuration, flow ──budget──▶ bytes of each role by part ──residency──▶ resident assets in each stage, and the moves

`runtimes.sizing` chooses sizes by these estimates. `training.memory` is the layer below: the bytes of a model
(`footprint`) and offloading of tensors (`offload`).
"""
