_caches = {}


def cache(subsection):
    return _caches.setdefault(subsection, {})
