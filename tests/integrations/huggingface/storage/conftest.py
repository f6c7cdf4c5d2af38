"""Fixtures of tests that save and load models."""

import pytest


@pytest.fixture(autouse=True)
def _no_bars():
    from transformers.utils import logging

    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()
