"""The streaming runtime: every stage is a loop on its own worker group, and pulls ready rows from the transfer queue.

program ──admits──▶ control: streams of rows, schedule, weights ◀──take, done── worker, generate ──▶ executor

`program` opens the queue and drives iterations, `orders` is the backend beside them, `groups` derives the worker groups of a flow,
`processes` starts and watches them, and `weights` brings new weights from trainers to engines.
"""
