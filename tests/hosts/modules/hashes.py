import os

from modules.cache import cache


def sha256_from_cache(filename, title, use_addnet_hash=False):
    known = cache("hashes").get(title)
    if known is None or os.path.getmtime(filename) > known["mtime"]:
        return None
    return known["sha256"]
