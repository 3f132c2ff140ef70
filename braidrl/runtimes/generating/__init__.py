"""What a generate stage does: requests, engines and their weights, episodes, early verification, early stop, residency.

rows ──generation──▶ engine (engines) ──finished rows──▶ verification, early_stop ──▶ columns
     ──episodes────▶ players on the same engine ──────▶
"""
