"""Values of one service that do not go together: said when the configuration is read, not when everything is loaded."""

from specwire.canary_config import changed
from specwire.draft_checkpoint import HEAD_METHODS
from specwire.errors import InvalidArgumentError, SpecwireError, UnsupportedError
from specwire.number_formats import check_formats
from specwire.speculative_config import SpeculativeConfig


def check_verifier(weights: str, dtype: str, device: str, max_model_len: int, speculative: SpeculativeConfig) -> None:
    """Raises InvalidArgumentError or UnsupportedError unless these fields of a verifier go together."""
    check_formats(weights, dtype, device)
    if max_model_len == 1:  # 0 is the model's context
        raise InvalidArgumentError("--max-model-len is 1, but a prompt token and an output token need 2; raise it")
    if _is_cuda(device) and speculative.rejection_sample_method == "probabilistic":
        raise UnsupportedError(
            f"rejection_sample_method is probabilistic and --device is {device}, but captured rounds have no kernel of the ratio test; "
            "use rejection_sample_method strict, or --device cpu"
        )


def check_drafter(weights: str, dtype: str, device: str, speculative: SpeculativeConfig) -> None:
    """Raises InvalidArgumentError or UnsupportedError unless these fields of a drafter go together."""
    check_formats(weights, dtype, device)
    if not speculative.has_model:
        return
    if weights == "int4" and speculative.model_method in HEAD_METHODS:
        raise UnsupportedError(
            f"--weights is int4, but the method is {speculative.model_method}, and 4 bits are not built for draft heads; take int8, bf16 or fp32, or "
            "leave it at auto"
        )
    draws = speculative.rejection_sample_method == "probabilistic" and speculative.draft_sample_method != "greedy"
    if _is_cuda(device) and draws:
        raise UnsupportedError(
            f"rejection_sample_method is probabilistic and --device is {device}, but captured drafting has no private noise; use "
            "rejection_sample_method strict, draft_sample_method greedy, or --device cpu"
        )


def check_half_batches(half_batches_from: int, max_outstanding_rounds: int, speculative: SpeculativeConfig) -> None:
    """Raises InvalidArgumentError unless a coordinator can take half of its batches."""
    if not half_batches_from:
        return
    given = f"--half-batches-from is {half_batches_from}"
    if max_outstanding_rounds < 2:
        raise InvalidArgumentError(f"{given}, but --max-outstanding-rounds is {max_outstanding_rounds}; allow 2, or leave half batches out")
    if speculative.enable_adaptive_verification:
        raise InvalidArgumentError(f"{given}, but adaptive verification reckons with steps one after the other; leave one of the two out")


def check_canary(canary_config: str, speculative: SpeculativeConfig) -> None:
    """Raises InvalidArgumentError or UnsupportedError unless this speculation can have such a canary, as far as the services' own limits allow it."""
    if not canary_config:
        return
    try:
        changed(speculative, canary_config, speculative.num_speculative_tokens)
    except SpecwireError as error:
        raise type(error)(f"--canary-config: {error}") from error


def _is_cuda(device: str) -> bool:
    return device.partition(":")[0] == "cuda"
