"""The streaming runtime: generation, frozen models and trainers are loops on worker groups, which pull ready rows from
the queue.

program ──admits──▶ control: schedule, table, verdicts ◀──take, done── generate ─▶ worker ─▶ train ──▶ executor

* `consumers`: a row leaves the queue for generation, for inference with devices of its own, and once for each trained
  role. All other stages run beside one of these: checks and shaping where rows are generated, computations of an update
  in its trainer.
* `schedule`: pure decisions on rows of consumers: admission, leases, the batch, publication.
* `stream`, `control`: a flow's rows and locations; the answers to workers. Selection runs here, on index columns.
* `steps`: the optimizer steps that trainers may make.
* `generate`, `worker`, `train`: a worker's loops. A trainer takes each row of a batch once, keeps it, runs its stages
  through the executor, accumulates as rows arrive, and asks only for permission to step. It reports the batch's columns
  once, at its end.
* `program` opens the queue and drives iterations, `orders` is the backend beside them, `groups` derives the processes
  of a flow, `processes` starts and watches them, and `weights` brings new weights from trainers to engines.
"""
