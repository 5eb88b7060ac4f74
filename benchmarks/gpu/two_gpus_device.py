"""A service that sees one GPU only: `python -m benchmarks.gpu.two_gpus_device GPU MODULE [ARGUMENT...]`."""

import os
import sys


def main() -> None:
    """Becomes the module."""
    gpu, module, *arguments = sys.argv[1:]
    os.execve(sys.executable, [sys.executable, "-m", module, *arguments], os.environ | {"CUDA_VISIBLE_DEVICES": gpu})


if __name__ == "__main__":
    main()
