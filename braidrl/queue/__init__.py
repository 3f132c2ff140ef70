"""The transfer queue: rows ready for each task, and locations of their columns. It knows no flows, batches or optimizer
steps.

client ─take, done──▶ transport ─▶ controller ──▶ tasks: ready rows, leases │ table: index columns, locations of payload
   └─────── payload as views ────▶ storage: shared memory of the node, or frames of another node; owner: frees it

`transfer_queue` is the complete library for any program; the streaming runtime has its own controller on the same
parts.
"""
