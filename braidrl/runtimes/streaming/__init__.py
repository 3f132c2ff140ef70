"""The streaming runtime: every stage is a loop of its own on its own worker group, and asks the transfer queue for rows that are ready.

program ──admits──▶ control: streams of rows, schedule, weights ◀──take, done── worker, generate ──▶ executor

`program` opens the queue and drives iterations, `backend` does what a run asks for beside them, `groups` says which workers a flow needs,
`processes` starts and watches them, and `weights` brings new weights from trainers to engines.
"""
