"""What Onefold's logger says."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def told(level: int = logging.INFO) -> Iterator[list[str]]:
    """Inside, messages of at least this level are added to the list."""
    logger, texts = logging.getLogger("onefold"), list[str]()
    handler, before = logging.Handler(level), logger.level
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
