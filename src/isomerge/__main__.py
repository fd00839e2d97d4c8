"""`python -m isomerge` is the command line."""

from isomerge.cli import main

if __name__ == "__main__":
    main()
