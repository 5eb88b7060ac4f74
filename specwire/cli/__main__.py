"""`python -m specwire.cli` is `specwire`."""

from specwire.cli import main

if __name__ == "__main__":
    main()
