"""What decides the last digits of a result beside its inputs: kept figures are only good for the same."""

import torch

from pipeline.training.device import Device


def arithmetic(device: Device) -> list[str]:
    """Kind of device, type of autocast, threads, and the version of torch."""
    return [device.device.type, str(device.autocast_dtype), str(torch.get_num_threads()), torch.__version__]
