# SPDX-License-Identifier: Apache-2.0
"""The target of the tests of offline/."""

from pathlib import Path

import pytest

from redrafter_testing.models.tiny_models import add_tokenizer, make_target


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_target(tmp_path_factory.mktemp("target"))
    add_tokenizer(folder)
    return folder
