"""Engines that turn prompts into trajectories.

Request ──▶ routing ──▶ an engine: embedded, divided, process, vllm, http ──▶ Response        episodes: many turns, one trajectory

`engine` is the protocol that every engine follows and `contract` the checks that each must pass; `requests` and `row` are its values,
`sampling`, `draws` and `stopping` say how tokens are drawn and what ends a response, `weights` is how new weights arrive.
"""
