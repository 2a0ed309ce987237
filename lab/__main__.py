"""The entry point of `python -m lab COMMAND`."""

from lab.commands.main import main

if __name__ == "__main__":
    main()
