"""Environment variables that a launcher sets for its ranks, and that torch reads when it is imported.

The command sets them before it imports torch, so this file imports nothing.
"""

QUIET = {
    "KINETO_LOG_LEVEL": "99",  # torch's profiler tells of its stages on the screen
    "TORCH_CPP_LOG_LEVEL": "FATAL",  # gloo's threads tell of peers that have ended: the launcher says which was first
}
