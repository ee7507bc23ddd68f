"""What was found, what was wanted, what to do: every mistake a user can make has a name here.

Each error is also the built-in exception a caller would expect, so `except ValueError` keeps working.
"""


class OnefoldError(Exception):
    """The base class of every error that Onefold raises on purpose."""


class ConfigError(OnefoldError, ValueError):
    """A setting is out of range, or two settings contradict each other."""


class ModelError(OnefoldError, ValueError):
    """The model cannot be sharded as it is."""


class OptimizerError(OnefoldError, ValueError):
    """The optimizer class, its groups or its hyperparameters cannot be used."""


class StateError(OnefoldError, RuntimeError):
    """A call came at the wrong moment, or used sharded state as if this rank held all of it."""


class PrecisionError(OnefoldError, ArithmeticError):
    """Gradients are infinite or NaN, and lowering the loss scale no longer helps."""


class MismatchError(OnefoldError, RuntimeError):
    """The ranks do not have the same model, settings or parameters, or another rank failed."""


class CommError(OnefoldError, RuntimeError):
    """A peer did not answer within `timeout_s`, or has ended; the message names the peer, the unit and the purpose."""


class OffloadError(OnefoldError, RuntimeError):
    """Host memory or disk is too small for what is offloaded, or a file there could not be read or written."""


class CheckpointError(OnefoldError, RuntimeError):
    """A checkpoint could not be written, found or read."""


class CheckpointRemoved(CheckpointError):
    """A checkpoint was removed by its run, which keeps only the newest, while it was being read; nothing is damaged."""


class CheckpointDamaged(CheckpointError):
    """A checkpoint's bytes are not those that were written; the message names the file and the tensor."""


class PlacementWarning(UserWarning):
    """Offload(optimizer="auto") found a step to take more memory than was planned, and moved optimizer state; or even
    without any of it on the device, memory is short."""


class ExposedWarning(UserWarning):
    """torchrun's store listens on every interface without authentication."""


def visible(text: object, also: str = "") -> str:
    r"""Text from files, users or peers as a message may show it: nothing in it can move the cursor, change colours or
    turn text around. Control characters, line ends, bidirectional overrides and bytes that are no text are written as
    their numbers. Characters in `also` stay as they are.

    >>> visible("w\x1b[2J\n\u202e")
    'w\\x1b[2J\\n\\u202e'
    """
    return "".join(c if c.isprintable() or c in also else c.encode("unicode_escape").decode("ascii") for c in str(text))
