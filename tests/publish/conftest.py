"""Fixtures of the publisher tests; their classes are in `support.streams.publish_world` and `support.faults`."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.faults.failing_requests import small_world as small_world
from support.streams.publish_world import PublishWorld


@pytest.fixture
def world(tmp_path: Path) -> PublishWorld:
    return PublishWorld(tmp_path)
