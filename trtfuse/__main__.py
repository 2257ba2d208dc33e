"""`python -m trtfuse` is the command line."""

from trtfuse.cli import main

main()
