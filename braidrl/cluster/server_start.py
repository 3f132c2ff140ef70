"""What a fork server that is a fresh interpreter imports first: nothing that it imports from then on is garbage, and none is looked for.

Its copies look again (`local.from_server`).
"""

import gc

gc.disable()
