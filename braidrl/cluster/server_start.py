"""The first import of a fresh fork server: disables garbage collection, since later imports hold no garbage.

Its copies enable it again (`local.from_server`).
"""

import gc

gc.disable()
