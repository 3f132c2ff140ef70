"""Code that may synchronise host and device or use float64, each with its reason; all other places are errors."""

from __future__ import annotations

WAITS = {
    "training/optimizer.py:all_finite": "once an optimizer step the host learns whether the weights are finite",
    "engines/embedded/slot_states.py:indices_of": (
        "once a step the host learns which rows have ended, and fills their slots"
    ),
    "engines/embedded/embedded_engine.py:EmbeddedEngine._take": "finished responses go to the host",
    "engines/sampling.py:sample": "the vocabulary is sorted only where its likeliest tokens do not reach top-p",
    "training/roles/worker.py:RoleWorker._forward": "answers of inference go to the host, once for each micro-batch",
    "training/roles/worker.py:RoleWorker.forward_backward": "once for each micro-batch: whether its loss is finite",
    "observe/metrics.py:Sums.add_per_token": "once for each micro-batch: all of its metrics",
    "training/optimizer.py:MasterOptimizer.step": "once an optimizer step: the norm of its gradient",
    "training/roles/checkpoint.py:copied": "a checkpoint is copied to host memory",
    "algorithms/advantages.py:Groups.__init__": "pairs are found anew in each micro-batch",
    "algorithms/row_losses.py:pair_loss": "pairs are checked in each micro-batch",
}
DOUBLES = {
    "engines/sampling.py:inverse_cdf": "running sums over the vocabulary, by which a token is found as on a CPU",
    "engines/sampling.py:sample": "running sums of the likeliest tokens",
}
