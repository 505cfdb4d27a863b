"""Coded weight storage: how it is recognised, and codes to numbers and back, one file per storage.

Nothing here merges, and nothing here reads files.
"""
