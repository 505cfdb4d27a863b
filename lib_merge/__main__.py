"""`python -m lib_merge` is the command line."""

from .cli import run

run()
