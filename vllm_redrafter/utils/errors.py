# SPDX-License-Identifier: Apache-2.0
"""The errors that a user can mend; the message says how."""


class ConfigError(ValueError):
    """A setting or a checkpoint that cannot work; the message names the value and the remedy."""


class TrainingError(RuntimeError):
    """Training stopped; the message says why, and what is left to go on from."""


def one_line(error: object) -> str:
    """What another library says of its error, as a part of a message of ours."""
    return " ".join(str(error).split())
