# SPDX-License-Identifier: Apache-2.0
"""What a launcher asks of its arguments; a kernel given anything else would read wild memory."""

import torch
from torch import Tensor


def require(condition: bool, message: str) -> None:
    """Raise ValueError with the message unless the condition holds."""
    if not condition:
        raise ValueError(message)


def require_last_dim_contiguous(**tensors: Tensor) -> None:
    """Each tensor's last dimension has stride 1; the first whose has not is named."""
    for name, tensor in tensors.items():
        require(
            tensor.shape[-1] <= 1 or tensor.stride(-1) == 1,
            f"{name}: the last dimension must be contiguous, its stride is {tensor.stride(-1)}",
        )


def require_same_device(reference: Tensor, **tensors: Tensor) -> None:
    """Each tensor is on the reference's device; the first that is not is named."""
    for name, tensor in tensors.items():
        require(
            tensor.device == reference.device,
            f"{name}: on {tensor.device}, expected {reference.device}",
        )


def require_like(reference: Tensor, **expected: tuple[Tensor, tuple[int, ...]]) -> None:
    """Each tensor has its shape, the reference's dtype and device, and contiguous rows."""
    for name, (tensor, shape) in expected.items():
        require(
            tensor.shape == shape and tensor.dtype == reference.dtype,
            f"{name}: expected {list(shape)} {reference.dtype}, got {list(tensor.shape)} "
            f"{tensor.dtype}",
        )
    tensors = {name: tensor for name, (tensor, _) in expected.items()}
    require_last_dim_contiguous(**tensors)
    require_same_device(reference, **tensors)


def require_layout(
    device: torch.device, **expected: tuple[Tensor, torch.dtype, tuple[int, ...]]
) -> None:
    """Each tensor is contiguous, of this dtype and shape, the first size being the least."""
    for name, (tensor, dtype, shape) in expected.items():
        found = tensor.shape
        if (
            tensor.dtype != dtype
            or len(found) != len(shape)
            or found[0] < shape[0]
            or found[1:] != shape[1:]
            or not tensor.is_contiguous()
            or tensor.device != device
        ):
            raise ValueError(
                f"{name}: expected contiguous {dtype} of shape {list(shape)} or more in the first "
                f"dimension on {device}, got {list(found)} {tensor.dtype} with strides "
                f"{list(tensor.stride())} on {tensor.device}"
            )
