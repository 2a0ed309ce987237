"""The command `triptych`, also as `python -m triptych`. Ctrl+C while its modules are imported shows no traceback."""

import sys


def main() -> None:
    """Run the command line and exit."""
    try:
        from triptych.service.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
