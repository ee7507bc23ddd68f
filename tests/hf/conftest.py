"""These tests need the frameworks; where one is missing they are skipped."""

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
