"""The streaming runtime on work of a given duration: `sleeping` has that work as plug-ins, `ways` times the
weight-update policies.
"""
