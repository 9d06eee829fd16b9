# SPDX-License-Identifier: Apache-2.0
"""Which KV connectors may ship the cache of an engine that verifies trees.

A tree's accepted rows are moved to their places at the end of the step that verified them. The
connectors below ship no row behind the tree's root before the next step.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# They ship the rows of requests that have finished.
NIXL = frozenset({"NixlConnector", "NixlPullConnector", "NixlPushConnector"})
# Each of its children is asked about.
MULTI = "MultiConnector"
LMCACHE = "LMCacheConnectorV1"
# "OffloadingConnector" stores the tokens that are known, in the step after.
ON_CUDA = NIXL | {MULTI, LMCACHE, "OffloadingConnector"}
# vLLM's offloading and LMCache copy with CUDA.
ON_CPU = NIXL | {MULTI}

EARLY = "may ship the cache before accepted rows are in their places"
NOT_WITH_LMCACHE = ("save_decode_cache", "use_layerwise")
"""Settings with which LMCache saves more than whole prompts, or each layer on its own."""


def connector_refusals(vllm_config: VllmConfig, allowed: Collection[str]) -> Iterator[str]:
    """Why the configured KV connector is not one of those `allowed`, and what to do."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector is None:
        return
    # vLLM makes the one of the other.
    offloads = vllm_config.cache_config.kv_offloading_size is not None
    remedy = f"leave {'--kv-offloading-size' if offloads else '--kv-transfer-config'} out"
    yield from _refusals(vars(transfer), allowed, remedy)


def _refusals(given: Mapping[str, Any], allowed: Collection[str], remedy: str) -> Iterator[str]:
    name, extra = given.get("kv_connector"), given.get("kv_connector_extra_config") or {}
    if module := given.get("kv_connector_module_path"):
        yield f"the KV connector {name!r} of {module} {EARLY}; leave kv_connector_module_path out"
    elif name not in allowed:
        reason = "needs CUDA" if name in ON_CUDA else EARLY
        names = ", ".join(sorted(allowed))
        yield f"the KV connector {name!r} {reason}; use one of {names}, or {remedy}"
    elif name == MULTI:
        for child in extra.get("connectors", ()):
            yield from _refusals(child, allowed, remedy)
    elif name == LMCACHE:
        for setting, source in _set_for_lmcache(extra):
            yield f"LMCache's {setting} is not supported; leave it out of {source}"


def _set_for_lmcache(extra: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The settings that are not supported, and where they are made: all places LMCache reads."""
    import yaml  # vLLM's and LMCache's requirement

    file = os.environ.get("LMCACHE_CONFIG_FILE")
    in_file = (yaml.safe_load(Path(file).read_text()) or {}) if file else {}
    for name in NOT_WITH_LMCACHE:
        variable = f"LMCACHE_{name.upper()}"
        places = {
            "kv_connector_extra_config": extra.get(f"lmcache.{name}"),
            "the environment": os.environ.get(variable),
            str(file): in_file.get(name),
        }
        for place, value in places.items():
            if str(value).strip().lower() in ("true", "1"):
                yield name, place
