"""The execution of generate stages: requests, engines and their weights, episodes, early verification, early stop.

rows ──generation──▶ engine (engines) ──finished rows──▶ verification ──▶ columns
     ──episodes────▶ players on the same engine ──────▶
"""
