"""The entry point of `python -m loadtest COMMAND`."""

from loadtest.commands.main import main

if __name__ == "__main__":
    main()
