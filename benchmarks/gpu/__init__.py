"""`make gpu`: checks and tables on a real device, with the packages of PYTHON; `DEVICE=cpu SIZE=tiny` runs the same
parts.

__main__ ──▶ checks: is it right?  ──▶ tables: how fast is it?         each part is printed and saved as it ends
"""
