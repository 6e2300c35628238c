"""pydantic's search for plugins, which is off while a model is built."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

from launcher.config.stage_schema import disable_plugins

NAME = "PYDANTIC_DISABLE_PLUGINS"


def test_models_may_be_built_in_several_threads() -> None:
    """The second thread enters while the first is within, and leaves after it."""
    before = os.environ.get(NAME)
    other_is_within, may_leave = threading.Event(), threading.Event()

    def build() -> str | None:
        with disable_plugins():
            other_is_within.set()
            may_leave.wait(5)
            return os.environ.get(NAME)

    with ThreadPoolExecutor() as pool:
        with disable_plugins():
            other = pool.submit(build)
            other_is_within.wait(0.05)  # for as long as it takes, where nothing keeps it out
        may_leave.set()
        assert other.result() == "__all__"
    assert os.environ.get(NAME) == before
