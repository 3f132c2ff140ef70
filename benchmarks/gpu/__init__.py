"""`make gpu`: what only a real device can show, in one command that needs torch and transformers alone; `DEVICE=cpu SIZE=tiny` is its twin.

__main__ ──▶ checks: is it right?  ──▶ tables: how fast is it?         each part prints, and is written down, as it ends
"""

from benchmarks.gpu.settings import stand_in

stand_in()
