"""A drafter process whose scores are the requests' true acceptance rates: `python -m benchmarks.gpu.known_drafter block|model --flag value`.

block: method `synthetic` (benchmarks/gpu/block_drafter.py); model: the configured draft model.
"""

import specwire.service_environment  # noqa: F401  (before gRPC)

# isort: split
import sys
from collections.abc import Callable

from benchmarks.gpu.known_rates import KnownRates
from drafter_svc.__main__ import serve
from drafter_svc.method import Method, build_method
from specwire.arguments import parse_flags
from specwire.config import DrafterConfig
from specwire.process import run_service, set_model_environment


def _block(config: DrafterConfig) -> Method:
    from benchmarks.gpu.block_drafter import Synthetic  # brings torch

    return Synthetic.from_config(config)


KINDS: dict[str, Callable[[DrafterConfig], Method]] = {"block": _block, "model": build_method}


def main() -> None:
    """Entry point."""
    kind, *flags = sys.argv[1:]
    config = parse_flags(DrafterConfig, f"python -m benchmarks.gpu.known_drafter {kind}", flags)
    set_model_environment()
    run_service("drafter", lambda: serve(config, lambda config: KnownRates(KINDS[kind](config))))


if __name__ == "__main__":
    main()
