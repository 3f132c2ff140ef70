"""The transfer queue: who may take which rows, and where their columns lie. It knows nothing of flows, batches or optimizer steps.

client ──take, done──▶ transport ──▶ tasks: what is ready, leases; samplers choose; table: index columns, whereabouts of payload
   └──────── payload as views ─────▶ storage: shared memory of the node, or frames from another node; owner: frees it in the end
"""
