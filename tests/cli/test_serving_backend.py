# SPDX-License-Identifier: Apache-2.0
"""Which of the two serves, by what is installed."""

import pytest

from vllm_redrafter.cli.serving_backend import require_mlx, serving_backend
from vllm_redrafter.utils.errors import ConfigError


@pytest.mark.parametrize(
    ("packages", "backend"),
    [({"vllm"}, "vllm"), ({"vllm", "mlx_lm"}, "vllm"), ({"mlx", "mlx_lm"}, "mlx")],
)
def test_vllm_serves_where_it_is_installed_and_else_mlx(packages: set[str], backend: str) -> None:
    assert serving_backend(packages.__contains__) == backend


def test_where_neither_is_installed_both_ways_to_install_are_named() -> None:
    with pytest.raises(ConfigError, match=r"vllm-redrafter\[cpu\].*'.\[mlx\]'"):
        serving_backend(lambda package: False)


@pytest.mark.parametrize("packages", [set(), {"mlx"}, {"mlx_lm"}])
def test_a_part_of_mlx_that_is_missing_is_named_with_the_remedy(packages: set[str]) -> None:
    with pytest.raises(ConfigError, match=r"pip install '.\[mlx\]'") as refused:
        require_mlx(packages.__contains__)
    named = str(refused.value).split(" not installed")[0].split(" and ")
    assert set(named) == {"mlx", "mlx_lm"} - packages
    require_mlx({"mlx", "mlx_lm"}.__contains__)
