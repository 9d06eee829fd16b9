# SPDX-License-Identifier: Apache-2.0
"""Results files."""

import json
from pathlib import Path

import pytest
from shared_parts import results


def test_a_results_file_is_json(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    results.write(path, {"seconds": [1.5, None]})
    assert json.loads(path.read_text()) == {"seconds": [1.5, None]}
    with pytest.raises(ValueError, match="not JSON compliant"):
        results.write(path, {"seconds": float("nan")})
