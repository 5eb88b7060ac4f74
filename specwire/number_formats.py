"""In which numbers a CPU can keep weights, and what goes with each: known without torch, so that a configuration is checked before a start."""

from specwire.errors import InvalidArgumentError

FORMAT_DTYPES = {"int4": "bfloat16", "int8": "bfloat16", "bf16": "bfloat16", "fp32": "float32"}
"""Format of the weights -> name of the dtype of all that is computed with them, and of keys and values."""


def check_formats(weights: str, dtype: str, device: str) -> None:
    """Raises InvalidArgumentError for formats on CUDA, and for a dtype that does not go with the format.

    Args:
        weights: a name of `FORMAT_DTYPES`, or auto.
        dtype: its name, or auto.
        device: cpu or cuda, with or without a number.
    """
    if weights == "auto":
        return
    if device.partition(":")[0] != "cpu":
        raise InvalidArgumentError(
            f"--weights is {weights}, but --device is {device}: formats are for CPUs, whose kernels they belong to; leave weights at auto, and "
            "choose the dtype"
        )
    needed = FORMAT_DTYPES[weights]
    if dtype not in ("auto", needed):
        raise InvalidArgumentError(f"--dtype is {dtype}, but --weights is {weights}, which is computed in {needed}; leave one of the two out")
