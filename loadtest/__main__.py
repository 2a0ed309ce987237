"""`python -m loadtest COMMAND`."""

from loadtest.cli import main

if __name__ == "__main__":
    main()
