"""Which host this stand-in is: a1111, reforge, forge or neo; and what it saw happen, oldest first."""

import os

NAME = os.environ["STAND_IN_HOST"]
FORGE = NAME in ("forge", "neo")
events = []
