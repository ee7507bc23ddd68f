"""A complete gradient that goes to the host: at once, or when the thread that updates its unit comes for it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from onefold.comm.spans import span
from onefold.offload.host import Host, Mark


class GradientTransfer:
    """It waits where it was made until somebody brings it; `left` is called when it need not be there any more. Its
    buffer on the host is free again when nobody holds it."""

    def __init__(
        self,
        name: str,
        host: Host,
        gradient: Tensor,
        norms: list[Tensor] | None = None,
        left: Callable[[], None] | None = None,
    ) -> None:
        self._name, self._host, self._made, self._left = name, host, host.mark(), left
        self._gradient: Tensor | None = gradient
        self._tensor: Tensor | None = None
        self.nbytes, self.landed = gradient.nbytes, Mark()
        self.norms = norms  # found on the device, which is faster

    def bring(self) -> None:
        """Begin to copy it to the host."""
        if self._gradient is not None:
            gradient, self._gradient = self._gradient, None
            with span("download", "gradient", self._name):
                self._tensor = self._host.staging.take(gradient.numel(), gradient.dtype)
                self.landed = self._host.to_host(gradient, self._tensor, self._made)

    def open(self) -> Tensor:
        self.bring()
        assert self._tensor is not None
        self.leave()
        return self._tensor

    def leave(self) -> None:
        """Wait for a copy that is on the way; then it need not be where it was made any more."""
        try:
            self.landed.wait()
        finally:
            left, self._left = self._left, None
            if left is not None:
                left()

    def __del__(self) -> None:
        if self._tensor is not None:
            self._host.staging.give(self._tensor)
        if self._left is not None:
            self.leave()
