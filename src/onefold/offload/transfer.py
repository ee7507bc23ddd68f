"""The transfer of one unit's reduced gradient to the host: started at once, or by the thread that updates the unit."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from onefold.comm.spans import span
from onefold.comm.streams import StreamEvent
from onefold.offload.host import Host


class GradientTransfer:
    """A gradient on the device that is, or will be, copied to the host. `on_released` is called once the device's
    buffer is no longer needed; the host's buffer returns to the pool when this object is freed."""

    def __init__(
        self,
        name: str,
        host: Host,
        gradient: Tensor,
        norms: list[Tensor] | None = None,
        on_released: Callable[[], None] | None = None,
    ) -> None:
        self._name, self._host, self._reduced, self._on_released = name, host, host.record_event(), on_released
        self._gradient: Tensor | None = gradient
        self._tensor: Tensor | None = None
        self.nbytes, self.copied = gradient.nbytes, StreamEvent()
        self.norms = norms  # of each parameter's part, computed on the device, which is faster
        self.changed = False  # on the host, since it was copied there

    def start_copy(self) -> None:
        """Starts the copy to the host, unless it has been started."""
        if self._gradient is not None:
            gradient, self._gradient = self._gradient, None
            with span("download", "gradient", self._name):
                self._tensor = self._host.staging.take(gradient.numel(), gradient.dtype)
                self.copied = self._host.to_host(gradient, self._tensor, self._reduced)

    def wait(self) -> Tensor:
        """Waits until the gradient is in host memory, where it may be read and changed."""
        self.start_copy()
        assert self._tensor is not None
        self.release_source()
        return self._tensor

    def changes(self) -> None:
        """The gradient is changed on the host: its norms are no longer what they were."""
        self.norms, self.changed = None, True

    def release_source(self) -> None:
        """Waits for a copy that was started, then releases the device's buffer; without a copy the gradient is lost."""
        try:
            self.copied.wait()
        finally:
            on_released, self._on_released = self._on_released, None
            if on_released is not None:
                on_released()

    def __del__(self) -> None:
        if self._tensor is not None:
            self._host.staging.give(self._tensor)
        if self._on_released is not None:
            self.release_source()
