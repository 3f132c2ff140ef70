"""Weights: which rank holds which slice, how slices move to another layout, and how a version reaches an engine.

parts ─▶ reshard_plan ─▶ publisher: in_place │ collective │ file ─▶ engine          versions says when it loads

boxes, shards, generation_layout    blocks of tensors, a rank's part of each, and the ranks that generate together
reshard_plan, transfer              moves between two layouts, and their execution in rounds
publisher                           the protocols; in_place, collective and file implement them
versions                            the update policies
model_files, checkpoint_files       lazy readers of model folders and checkpoints
transport_contract                  checks of weight transports

A role's weights, its adapters alone, and EMA or target-network copies use the same path.
"""
