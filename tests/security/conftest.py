"""A folder that other users can reach, which pytest's own are not."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def shared_path() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="onefold-shared-"))
    path.chmod(0o755)
    try:
        yield path
    finally:
        shutil.rmtree(path)
