# SPDX-License-Identifier: Apache-2.0
"""Ask a running server to go on with another drafter."""

import json
import re
import urllib.error
import urllib.request
from pathlib import Path

from vllm_redrafter.utils.errors import ConfigError

SECONDS = 600.0
"""For all ranks to read a drafter, which may come from the hub."""


def swap_drafter(drafter: str, url: str) -> str:
    """Replace the drafter of vLLM's server at `url`; returns what the server calls the new one.

    Raises:
        ConfigError: no server, it does not offer this, or it refuses the drafter and keeps its own.
    """
    folder = Path(drafter).expanduser()
    named = str(folder.resolve()) if folder.is_dir() else drafter
    call = json.dumps({"method": "redrafter_swap", "args": [named]}).encode()
    address, headers = f"{url.rstrip('/')}/collective_rpc", {"Content-Type": "application/json"}
    try:
        request = urllib.request.Request(address, call, headers)
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            return str(json.load(answer)["results"][0]["drafter"])
    except urllib.error.HTTPError as error:
        raise ConfigError(_reason(named, url, error.code, error.read().decode())) from error
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"no server of vLLM answers at {url!r} ({error}): name its address with --url"
        ) from error


def _reason(drafter: str, url: str, status: int, body: str) -> str:
    if status == 404:
        return (
            f"the server at {url} offers no /collective_rpc: start it with VLLM_SERVER_DEV_MODE=1 "
            "in its environment, where nobody else can reach it"
        )
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        message = body
    if "redrafter_swap" in message:
        return f"the server at {url} serves no ReDrafter: start it with --spec-model DRAFTER"
    # What vLLM puts around the error of a worker, in which it hides paths.
    wrapped = r"(?s)Call to \w+ method failed: (?:Worker failed with error ')?(.*?)(', please .*)?"
    if (refused := re.fullmatch(wrapped, message)) is None:
        return f"the server at {url} answers with status {status}: {message}"
    return f"the server at {url} refuses {drafter} and keeps its own: {refused[1]}"
