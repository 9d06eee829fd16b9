# SPDX-License-Identifier: Apache-2.0
"""A folder's description: it is written once, and what is continued is the same."""

from dataclasses import replace
from pathlib import Path

import pytest

from vllm_redrafter.data.dataset import DatasetInfo
from vllm_redrafter.data.folder_info import begin
from vllm_redrafter.data.generation_settings import SamplingSettings
from vllm_redrafter.utils.errors import ConfigError

INFO = DatasetInfo("here", "a", "b", None, "c", 4, 4, 10, sampling=SamplingSettings(top_k=5))


def test_a_folder_is_continued_by_what_it_was_begun_with(tmp_path: Path) -> None:
    for info in (INFO, replace(INFO, target="the same files elsewhere")):
        begin(tmp_path, info)
        assert DatasetInfo.load(tmp_path) == INFO


def test_all_that_differs_is_named(tmp_path: Path) -> None:
    begin(tmp_path, INFO)
    other = replace(INFO, shard_size=3, sampling=SamplingSettings())
    with pytest.raises(
        ConfigError, match=r"cannot .* with these: shard_size: 4, not 3; top_k: 5, not None\. Give"
    ):
        begin(tmp_path, other)
    assert DatasetInfo.load(tmp_path) == INFO
