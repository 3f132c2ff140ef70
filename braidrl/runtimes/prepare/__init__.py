"""Preparation before the first step: `run_flow` makes every default of the flow explicit, `setup` loads tokenizer, data
and verifiers, `checks` refuses configurations that cannot run, `fetching` downloads from a hub.
"""
