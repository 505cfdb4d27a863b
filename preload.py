"""Options that the Merge tab adds to the web UI's own command line."""


def preload(parser):
    """Called while the host reads its command line, before torch and gradio are loaded."""
    parser.add_argument("--merge-threads", type=int, default=None, help="threads of the Merge tab; default: the cores")
