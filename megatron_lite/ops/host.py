"""Small host numbers on their way to a device.

A copy out of ordinary (pageable) memory makes the host wait for everything the device has in hand; one out of
page-locked memory is queued like a kernel. PyTorch's allocator of page-locked memory keeps a block from reuse until the
copy is over, so nothing has to be kept alive by hand.
"""

from __future__ import annotations

import torch


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A CPU tensor on ``device``, in the order of the current stream; the host does not wait."""
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
