"""Session set-up: environment before torch is imported, skips of gpu tests, and the end of the rank pools."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = str(Path(__file__).resolve().parent.parent)
if ROOT not in sys.path:  # ranks get this sys.path too: they import test modules as tests.dist.test_x
    sys.path.insert(0, ROOT)

from tests.harness import ENV, close_pools, start_server  # noqa: E402

for name, value in ENV.items():
    os.environ.setdefault(name, value)


# Tests never judge by time: a loaded machine is no fault of the code. In CI every run draws the same examples.
settings.register_profile(
    "ds_tsp", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=bool(os.environ.get("CI"))
)
settings.load_profile("ds_tsp")


def pytest_pycollect_makemodule(module_path: Path) -> None:
    if module_path.parent.name in ("dist", "integration"):
        start_server()  # its imports overlap with those of the test modules


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch  # here only: most runs collect no gpu test

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="torch.cuda.is_available() is False"))


@pytest.fixture(scope="session", autouse=True)
def _end_pools() -> Iterator[None]:
    yield
    close_pools()
