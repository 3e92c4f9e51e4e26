"""Shared by all tests: the reason for which GPU tests skip, and a clean choice of backend for those that change it."""
import pytest
import torch

import submission


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason=f"torch {torch.__version__} sees no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture
def fresh_choice(monkeypatch):
    """No QR_ variable set and no backend chosen yet, now and after the test."""
    for name in ("QR_BACKEND", "QR_FORCE_FALLBACK", "THUNDERKITTENS_ROOT"):
        monkeypatch.delenv(name, raising=False)
    submission.choose_backend.cache_clear()
    submission._route.cache_clear()
    yield
    submission.choose_backend.cache_clear()
    submission._route.cache_clear()
