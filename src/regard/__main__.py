"""The command `regard` of one Python, where several are installed: `python -m regard`."""

from regard_command import main

if __name__ == "__main__":
    main()
