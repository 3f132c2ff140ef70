"""The transfer queue: a control plane that knows where every row stands, and a data plane that holds what is in it.

worker ──take, done──▶ server ──▶ control plane: bitmaps, leases, index columns       one ZeroMQ ROUTER, msgpack
   └──────── payload as views ──▶ data plane: shared memory of the node, or frames from another node
"""
