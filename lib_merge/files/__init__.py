"""Bytes of model files to tensors and back: headers, positioned reads, streaming writes, folders, pickles, hashes.

Nothing here knows what merging is, and nothing here decides what a tensor means.
"""
