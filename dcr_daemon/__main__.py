"""`python -m dcr_daemon` is the `dcr` command."""

from dcr_daemon.cli import main

if __name__ == "__main__":
    main()
