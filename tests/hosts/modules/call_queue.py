import threading


class FIFOLock:
    """Not re-entrant: who takes it twice would wait for ever, so here it is an error."""

    def __init__(self):
        self._lock, self.owner = threading.Lock(), None

    def __enter__(self):
        assert self.owner != threading.get_ident(), "the queue's lock is taken twice by one thread"
        self._lock.acquire()
        self.owner = threading.get_ident()

    def __exit__(self, *exc):
        self.owner = None
        self._lock.release()


queue_lock = FIFOLock()
