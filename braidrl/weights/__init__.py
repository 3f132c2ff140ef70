"""How weights reach an engine: `local` from this process, `shared_file` and `joint_file` through memory that processes of a machine
share, `broadcast` over the network.
"""
