"""`make gpu`: checks and tables on a real device. It needs only torch and transformers; `DEVICE=cpu SIZE=tiny` runs the same parts.

__main__ ──▶ checks: is it right?  ──▶ tables: how fast is it?         each part is printed and saved as it ends
"""

from benchmarks.gpu.settings import stand_in

stand_in()
