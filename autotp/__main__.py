"""``python -m autotp``: the command line."""

from autotp.cli import main

if __name__ == "__main__":
    main()
