"""Rollout engines: they turn prompts into responses.

Request ──▶ routing ──▶ an engine: embedded, divided, process, vllm, http ──▶ Response

`engine` is the protocol that every engine follows and `engine_contract` the checks that each must pass. `requests` and `row_request` are
its values, `stepping` is the base of engines that draw token by token, `sampling` says how tokens are drawn, `factory` makes a role's
engines from the configuration.
"""
