"""The streaming runtime: every stage is a loop of its own on its own worker group, and asks the transfer queue for rows that are ready.

program (main process) ──admits──▶ transfer queue ◀──leases── worker: loops/generate, loops/model, loops/compute

`groups` says which worker groups a flow needs, `processes` starts and watches them, `context` is what every worker has at hand, and
`weights` brings new weights from trainers to engines.
"""
